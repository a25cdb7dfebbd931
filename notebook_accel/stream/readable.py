"""What a socket or pipe has for its reader; without other libraries, as a script imports it before its own modules."""

from __future__ import annotations

import selectors
from typing import Protocol


class HasFileno(Protocol):
    def fileno(self) -> int: ...


def wait_readable(source: int | HasFileno, seconds: float) -> bool:
    """Wait until something can be read, or the other end is closed.

    `select.select` raises for descriptors above 1023, which a kernel with many open files has.

    Args:
        source: a descriptor or what has one.
        seconds: how long to wait at most; 0 only looks.

    Returns:
        Whether something can be read.

    Raises:
        OSError, ValueError: the descriptor is closed.
    """
    with selectors.PollSelector() as selector:  # which opens no descriptor of its own
        selector.register(source, selectors.EVENT_READ)
        return bool(selector.select(seconds))


def count_unread_bytes(fd: int) -> int:
    """Return how many bytes were written to a pipe and not read yet.

    Args:
        fd: either of the pipe's ends.
    """
    # here: a script may have modules of these names
    import fcntl
    import struct
    import termios

    try:
        waiting = fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0")
    except OSError:
        return 0
    return int(struct.unpack("i", waiting)[0])
