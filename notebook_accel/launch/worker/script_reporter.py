"""In a rank that runs a script: its way to the launcher, made when there is something to say or to hear."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import sys

from ...events import Failure, Order, RaisedError, Traceback
from ...stopping import StopPoint
from ...stream import capture
from ...stream.emit import Emitter
from ..transfer import tracebacks
from .order_listener import OrderListener


class ScriptReporter:
    """Tells the launcher how the script fares, and answers its questions.

    Args:
        rank: this process's.
        events: descriptor of the socket that joins it with the launcher.
        thread: the thread that runs the script, by its identifier.
    """

    def __init__(self, rank: int, events: int, thread: int) -> None:
        connection = socket.socket(fileno=events)
        self._emitter = Emitter(connection, rank)
        self._failure: Failure | None = None
        OrderListener(connection, self._emitter, StopPoint(), _ignore, capture.write_out, thread)

    def show_traceback(self, error: BaseException, at: float, moment: float) -> None:
        """Send an exception as the script's own hook shows it; the launcher shows one of all ranks'.

        Args:
            error: with a traceback of the script's frames alone.
            at: when it was raised, in seconds since the epoch.
            moment: the same by the monotonic clock.
        """
        emitter, text = self._emitter, _call_hook(error)
        capture.flush_pipes()  # what the script wrote comes first
        emitter.emit(Traceback(rank=emitter.rank, time=at, text=text))
        raised = RaisedError(
            type_name=type(error).__qualname__,
            message=_read_text(error),
            pickled=None,
            frames=tracebacks.read_frames(error.__traceback__),
        )
        self._failure = Failure(rank=emitter.rank, time=at, pid=os.getpid(), error=raised, moment=moment)

    def send_failure(self) -> None:
        """Send the failure, where there is one: the launcher then ends this process and all others."""
        if self._failure is not None:
            self._emitter.emit(self._failure)


def _ignore(order: Order) -> None:
    """Obey no order of a kind that scripts do not know."""


def _call_hook(error: BaseException) -> str:
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except Exception:
            sys.__excepthook__(type(error), error, error.__traceback__)
    return text.getvalue()


def _read_text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"<its text raised {type(broken).__name__}>"
