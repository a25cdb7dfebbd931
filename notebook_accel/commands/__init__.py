"""The names that users import from `accelerate.commands`; they are defined in other modules."""

from ..takeover.names import complete_names

complete_names(__name__)
