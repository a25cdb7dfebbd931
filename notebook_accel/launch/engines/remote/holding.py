"""An agent's connection to the process that holds its host for a run: a job of SLURM lasts as long as one is open."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Final

_SECONDS: Final = 600.0


class Hold:
    """A connection, made as soon as the other process listens: a host may let an agent in before the job's own process.

    Args:
        name: of the abstract socket; empty for none. On a host where nobody listens there is never a connection.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._deadline = time.monotonic() + _SECONDS
        self._connection: socket.socket | None = None

    def try_connect(self) -> None:
        """Connect, if that is still to be done and somebody listens."""
        if not self._name or self._connection is not None:
            return
        if time.monotonic() > self._deadline:
            return
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(f"\0{self._name}")
        except OSError:
            connection.close()
        else:
            self._connection = connection

    def close(self) -> None:
        """Let go."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.close()
