"""The names that users import from `accelerate.commands.tpu`; they are defined in other modules."""

import functools
import sys

from ..cli.tpu_parser import tpu_command_launcher, tpu_command_parser
from ..takeover.names import complete_names, run_command

__all__ = ["main", "tpu_command_launcher", "tpu_command_parser"]

main = functools.partial(run_command, "tpu-config")

if __name__ == "__main__":
    sys.exit(main())

complete_names(__name__)
