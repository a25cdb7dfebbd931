"""`python -m notebook_accel` is the command `notebook-accel`."""

from .cli.main import main

if __name__ == "__main__":
    main()
