"""The names that users import from `accelerate.commands.launch`; they are defined in other modules."""

import functools
import sys

from ..cli.launch_parser import launch_command, launch_command_parser
from ..cli.launch_parser import validate_launch_command as _validate_launch_command
from ..takeover.names import complete_names, run_command

__all__ = ["_validate_launch_command", "launch_command", "launch_command_parser", "main"]

main = functools.partial(run_command, "launch")

if __name__ == "__main__":
    sys.exit(main())

complete_names(__name__)
