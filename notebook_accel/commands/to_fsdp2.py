"""The names that users import from `accelerate.commands.to_fsdp2`; they are defined in other modules."""

from ..cli.to_fsdp2_parser import (
    convert_config_to_fsdp2,
    load_config,
    to_fsdp2_command,
    to_fsdp2_command_parser,
)
from ..takeover.names import complete_names

__all__ = ["convert_config_to_fsdp2", "load_config", "to_fsdp2_command", "to_fsdp2_command_parser"]

complete_names(__name__)
