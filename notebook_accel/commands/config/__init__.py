"""The names that users import from `accelerate.commands.config`; they are defined in other modules."""

import functools
import sys

from ...cli.config_parser import get_config_parser
from ...takeover.names import complete_names, run_command
from ...utils.cluster import default_config_file, load_config_from_file

__all__ = ["default_config_file", "get_config_parser", "load_config_from_file", "main"]

main = functools.partial(run_command, "config")

if __name__ == "__main__":
    sys.exit(main())

complete_names(__name__)
