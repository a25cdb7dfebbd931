"""A second connection of a node to the coordinator, on which nothing is said: it ends soon after the network does.

The system asks the other end of a silent connection once a second. What is on its way on a connection in use is sent
again after longer and longer times instead, so that nobody could tell a network that is down for ten seconds from one
that stays down.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections.abc import Callable
from typing import Final

from ....stream.listener import keep_alive
from ... import descriptors

_PROBE_SECONDS: Final = 1
_PROBES: Final = 12  # without an answer: more than ten seconds, with what ends then less than fifteen
_PEER_ENDS: Final = (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED)


def watch_network(connection: socket.socket) -> None:
    """Have the system end a silent connection thirteen seconds after the last answer of the other machine."""
    keep_alive(connection, _PROBE_SECONDS, _PROBE_SECONDS, _PROBES, is_silent=True)


def is_cut_off(error: OSError) -> bool:
    """Return whether an error of a silent connection says that the other machine does not answer.

    Where its end was closed, for example for other connections that came, it does.
    """
    return error.errno not in _PEER_ENDS


class Pulse:
    """A node's end of such a connection; a thread waits for its end.

    Args:
        connection: to the coordinator, by proof.
        on_silence: called by the thread when the coordinator's machine does not answer any more.
    """

    def __init__(self, connection: socket.socket, on_silence: Callable[[], None]) -> None:
        watch_network(connection)
        self._connection = connection
        self._on_silence = on_silence
        self._waiting = threading.Thread(target=self._wait, name="notebook_accel pulse", daemon=True)
        descriptors.keep_from_forks(self)
        self._waiting.start()

    def close(self) -> None:
        """End the connection."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._waiting.join()
        self._connection.close()
        descriptors.forget(self)

    def filenos(self) -> list[int]:
        """Return the descriptors that no forked process may keep."""
        fd = self._connection.fileno()
        return [fd] if fd >= 0 else []

    def _wait(self) -> None:
        try:
            while self._connection.recv(1):
                pass
        except OSError as error:
            if is_cut_off(error):
                self._on_silence()
