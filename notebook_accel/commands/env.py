"""The names that users import from `accelerate.commands.env`; they are defined in other modules."""

import functools
import sys

from ..cli.env_parser import env_command, env_command_parser, which
from ..takeover.names import complete_names, run_command

__all__ = ["env_command", "env_command_parser", "main", "which"]

main = functools.partial(run_command, "env")

if __name__ == "__main__":
    sys.exit(main())

complete_names(__name__)
