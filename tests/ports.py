"""TCP ports for tests, which the system gives to nobody else meanwhile."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserve_port() -> Iterator[int]:
    """Yield a TCP port that the system gives to nobody else meanwhile; who knows it may listen there.

    A socket that is bound but does not listen lets others bind its port by name, if they allow for sockets of before
    (SO_REUSEADDR), as servers do.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


def free_port() -> int:
    """Return a TCP port where nobody listened a moment ago; who shall listen there needs `reserve_port`."""
    with reserve_port() as port:
        return port
