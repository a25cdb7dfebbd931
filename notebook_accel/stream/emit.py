"""The worker's end of the event socket."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from typing import Final

from ..events import Event
from .wire import frame

_IOV_MAX: Final = 512


class Emitter:
    """Sends events of one rank. Any thread may use it; in a process that the worker forked it does nothing.

    Args:
        sock: the worker's event socket.
        rank: of the worker.
    """

    def __init__(self, sock: socket.socket, rank: int) -> None:
        self.rank = rank
        self._socket = sock
        self._lock = threading.Lock()
        self._pid = os.getpid()

    @property
    def usable(self) -> bool:
        """True in the worker itself, False in a process that it forked, such as a data loader's worker."""
        return os.getpid() == self._pid

    def now(self) -> float:
        """Return the time for an event, in seconds since the epoch."""
        return time.time()

    def emit(self, event: Event) -> None:
        """Send one event; return when the socket has taken all of it.

        The interrupt signal is blocked meanwhile: after half a frame nothing could be read any more.

        Args:
            event: the event.
        """
        if not self.usable:
            return
        parts = frame(event)
        masked = _hold_interrupt()
        try:
            with self._lock:
                self._send(parts)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the notebook has ended; the lifeline ends this worker too
        finally:
            _release_interrupt(masked)

    def _send(self, parts: list[memoryview]) -> None:
        while parts:
            sent = self._socket.sendmsg(parts[:_IOV_MAX])
            while parts and sent >= parts[0].nbytes:
                sent -= parts[0].nbytes
                parts = parts[1:]
            if sent:
                parts = [parts[0][sent:], *parts[1:]]


def _hold_interrupt() -> bool:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    return signal.SIGINT not in before


def _release_interrupt(masked: bool) -> None:
    if masked:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
