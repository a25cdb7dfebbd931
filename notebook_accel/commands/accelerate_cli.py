"""The names that users import from `accelerate.commands.accelerate_cli`; they are defined in other modules."""

import functools
import sys

from ..takeover.names import complete_names, run_command

__all__ = ["main"]

main = functools.partial(run_command)

if __name__ == "__main__":
    sys.exit(main())

complete_names(__name__)
