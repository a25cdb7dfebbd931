"""`python -m notebook_accel` is the command `notebook-accel`."""

import sys
from typing import Any


def main() -> Any:
    """Run the command; an interrupt while it is still being imported ends it as later ones do.

    Where required libraries are missing, it ends with code 1 and a sentence that names all of them, or installs them if
    that was asked for. One that cannot be imported is named likewise.
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
        if not requirements.is_of_missing(error):
            if not (sentence := requirements.describe_broken(error)):
                raise
            print(f"Error: {sentence}", file=sys.stderr)
            sys.exit(1)
    from .cli import missing

    return missing.handle(sys.argv[1:])


if __name__ == "__main__":
    main()
