"""The names that users import from `accelerate.commands.config.default`; they are defined in other modules."""

from ...cli.config_parser import default_command_parser, default_config_command
from ...config.basic import write_basic_config
from ...takeover.names import complete_names

__all__ = ["default_command_parser", "default_config_command", "write_basic_config"]

complete_names(__name__)
