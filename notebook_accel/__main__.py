"""`python -m notebook_accel` is the command `notebook-accel`."""

import sys
from typing import Any


def main() -> Any:
    """Run the command; an interrupt while it is still being imported ends it as later ones do."""
    try:
        from .cli import main as command

        return command.main()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
