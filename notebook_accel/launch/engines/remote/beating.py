"""In a process beside the notebook: says to the agents that the notebook lives, also while it is busy in C code.

It runs as a file, by the standard library alone. It ends with the notebook.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Sequence


def beat(connection: socket.socket, seconds: float, word: bytes) -> None:
    """Write a word to each pipe now and then, until the notebook is gone.

    Args:
        connection: brings pipes of the notebook.
        seconds: between two words.
        word: what is written.
    """
    pipes: list[int] = []
    while True:
        ready, _, _ = select.select([connection], [], [], seconds)
        if ready:
            data, new, _, _ = socket.recv_fds(connection, 1, 16)
            if not data:
                return
            pipes += new
            continue
        for pipe in list(pipes):
            try:
                os.write(pipe, word)
            except BlockingIOError:
                pass  # what fills it is as good
            except OSError:
                pipes.remove(pipe)
                os.close(pipe)


def main(words: Sequence[str]) -> None:
    """Beat as the command line says: descriptor, seconds, and the word in hexadecimal digits."""
    beat(socket.socket(fileno=int(words[0])), float(words[1]), bytes.fromhex(words[2]))


if __name__ == "__main__":
    main(sys.argv[1:])
