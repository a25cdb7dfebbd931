"""A plain Python program that runs pieces of code one after the other, as a user's script has one after the other."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback

NAMES = globals()  # launches in the background put another module in the place of `__main__` for moments


def run_piece(code: str, number: int) -> list[str] | None:
    """Run a piece of code in this module; return the type, text and traceback of what it raises."""
    try:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            exec(compile(code, f"<piece {number}>", "exec"), NAMES)
        finally:
            ignore_interrupts()
    except BaseException as error:
        ignore_interrupts()  # one may have come just before
        sys.last_value = error
        return [type(error).__name__, str(error), traceback.format_exc()]
    return None


def ignore_interrupts() -> None:
    """Have interrupts do nothing: they are for pieces."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def main() -> None:
    """Read pieces from the first descriptor, a JSON text a line, and answer on the second."""
    ignore_interrupts()
    pieces, answers = (int(word) for word in sys.argv[1:3])
    for fd in (pieces, answers):
        os.set_inheritable(fd, False)
    with open(pieces) as source:
        for number, line in enumerate(source):
            error = run_piece(json.loads(line), number)
            sys.stdout.flush()
            os.write(answers, json.dumps(error).encode() + b"\n")


if __name__ == "__main__":
    main()
