"""The names that users import from `accelerate.commands.config.update`; they are defined in other modules."""

from ...cli.config_parser import update_command_parser, update_config, update_config_command
from ...takeover.names import complete_names

__all__ = ["update_command_parser", "update_config", "update_config_command"]

complete_names(__name__)
