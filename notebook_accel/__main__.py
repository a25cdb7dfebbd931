"""`python -m notebook_accel` is the command `notebook-accel`."""

import sys
from typing import Any


def main() -> Any:
    """Run the command; an interrupt while it is still being imported ends it as later ones do.

    Where required libraries are missing, it ends with code 1 and a sentence that names all of them. One that cannot be
    imported is named likewise.
    """
    try:
        return _run()
    except KeyboardInterrupt:
        sys.exit(130)


def _run() -> Any:
    from . import requirements

    if impostor := requirements.find_impostor():
        print(f"Error: {impostor}", file=sys.stderr)
        return sys.exit(1)
    try:
        from .cli import main as command

        return command.main()
    except ImportError as error:
        if requirements.is_of_missing(error):
            sentence = requirements.describe(requirements.find_missing())
        elif not (sentence := requirements.describe_broken(error)):
            raise
        print(f"Error: {sentence}", file=sys.stderr)
        return sys.exit(1)


if __name__ == "__main__":
    main()
