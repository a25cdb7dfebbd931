"""The names that users import from `accelerate.commands.merge`; they are defined in other modules."""

import functools
import sys

from ..cli.merge_parser import merge_command, merge_command_parser
from ..takeover.names import complete_names, run_command

__all__ = ["main", "merge_command", "merge_command_parser"]

main = functools.partial(run_command, "merge-weights")

if __name__ == "__main__":
    sys.exit(main())

complete_names(__name__)
