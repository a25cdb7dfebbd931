"""The names that users import from `accelerate.commands.test`; they are defined in other modules."""

import functools
import sys

from ..cli.test_parser import test_command, test_command_parser
from ..takeover.names import complete_names, run_command
from ..utils.testing_programs import execute_subprocess_async, path_in_accelerate_package

__all__ = [
    "execute_subprocess_async",
    "main",
    "path_in_accelerate_package",
    "test_command",
    "test_command_parser",
]

main = functools.partial(run_command, "test")

if __name__ == "__main__":
    sys.exit(main())

complete_names(__name__)
