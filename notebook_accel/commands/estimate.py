"""The names that users import from `accelerate.commands.estimate`; they are defined in other modules."""

import functools
import sys

from ..cli.estimate_parser import (
    add_timm_hub_prefix,
    check_has_model,
    create_empty_model,
    estimate_command,
    estimate_command_parser,
    estimate_training_usage,
    gather_data,
    verify_on_hub,
)
from ..takeover.names import complete_names, run_command

__all__ = [
    "add_timm_hub_prefix",
    "check_has_model",
    "create_empty_model",
    "estimate_command",
    "estimate_command_parser",
    "estimate_training_usage",
    "gather_data",
    "main",
    "verify_on_hub",
]

main = functools.partial(run_command, "estimate-memory")

if __name__ == "__main__":
    sys.exit(main())

complete_names(__name__)
