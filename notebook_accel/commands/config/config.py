"""The names that users import from `accelerate.commands.config.config`; they are defined in other modules."""

import functools
import sys

from ...cli.config_parser import config_command, config_command_parser
from ...takeover.names import complete_names, run_command

__all__ = ["config_command", "config_command_parser", "main"]

main = functools.partial(run_command, "config")

if __name__ == "__main__":
    sys.exit(main())

complete_names(__name__)
