"""In a worker: the thread that obeys the notebook's orders and reports how far the training has come."""

from __future__ import annotations

import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from typing import Final

from ... import runtime
from ...events import (
    Held,
    HoldOrder,
    LeaveOrder,
    Order,
    Pulse,
    StackOrder,
    StackReport,
    StopOrder,
    WriteOrder,
)
from ...stopping import StopPoint
from ...stream.emit import Emitter
from ...stream.readable import wait_readable
from ...stream.wire import FrameReader
from . import flight_recorder
from .stacks import BACKWARD, describe_users_frames, find_collective, read_stack

_INTERVAL: Final = 0.5
_WRITE_INTERVAL: Final = 0.2  # as in Jupyter's kernels
_BYTES: Final = 1 << 16


class OrderListener:
    """Obeys orders as they come, and sends a pulse where something changed since the last one.

    It reads what the training notes for itself anyway, so the training pays nothing for it.

    Args:
        events: the socket that orders come on.
        emitter: sends events.
        stop_point: where ranks agree to stop.
        obey: takes orders of other kinds than those for stacks and stops.
        write_out: writes what was printed without a newline; called every 0.2 s while no order comes, and by one.
        thread: the thread that trains, by its identifier; None is the calling one.

    Attributes:
        began_ns: when the call of a session began, in nanoseconds since the epoch: no collective before it is reported.
    """

    def __init__(
        self,
        events: socket.socket,
        emitter: Emitter,
        stop_point: StopPoint,
        obey: Callable[[Order], None],
        write_out: Callable[[], None],
        thread: int | None = None,
    ) -> None:
        self._obey_other = obey
        self._write_out = write_out
        self._events = events
        self._emitter = emitter
        self._stop_point = stop_point
        self._frames = FrameReader()
        self._thread = thread or threading.get_ident()
        self.began_ns = 0
        self._last: Pulse | None = None
        self._next_pulse = monotonic() + _INTERVAL
        threading.Thread(target=self._run, name="notebook_accel listener", daemon=True).start()

    def _run(self) -> None:
        """Obey until the notebook is gone, and the lifeline ends this worker; or until nothing can be heard of it."""
        try:
            while True:
                if not wait_readable(self._events, _WRITE_INTERVAL):
                    self._idle()
                elif data := self._events.recv(_BYTES):
                    for order in self._frames.feed(data):
                        self._try(self._obey, order)
                else:
                    break
        except (OSError, ValueError):
            pass  # the connection was reset, or a script has closed all descriptors
        # nobody will tell it any more
        self._try(self._obey_other, LeaveOrder(rank=self._emitter.rank, time=self._emitter.now()))

    def _idle(self) -> None:
        self._try(self._write_out)
        if monotonic() >= self._next_pulse:
            self._next_pulse = monotonic() + _INTERVAL
            self._try(self.send_pulse)

    def _try(self, step: Callable[..., None], *args: object) -> None:
        """Take a step; whatever it raises is shown, and the next order is obeyed all the same."""
        try:
            step(*args)
        except Exception:
            print(f"rank {self._emitter.rank}: the notebook's order failed:", file=sys.stderr)
            traceback.print_exc()

    def _obey(self, order: object) -> None:
        emitter = self._emitter
        if isinstance(order, HoldOrder):
            questions = self._stop_point.hold()
            emitter.emit(Held(rank=emitter.rank, time=emitter.now(), questions=questions))
        elif isinstance(order, StopOrder):
            self._stop_point.set(order.question)
        elif isinstance(order, WriteOrder):
            self._write_out()
        elif isinstance(order, StackOrder):
            emitter.emit(report_stack(self._thread, emitter.rank, emitter.now(), self.began_ns))
        elif isinstance(order, Order):
            self._obey_other(order)

    def send_pulse(self) -> None:
        """Send a pulse where something changed."""
        emitter = self._emitter
        collective = find_collective(read_stack(self._thread))
        pulse = make_pulse(emitter.rank, emitter.now(), "" if collective == BACKWARD else collective)
        if self._last is None or pulse != replace(self._last, time=pulse.time, moment=pulse.moment):
            self._last = pulse
            emitter.emit(pulse)


def report_stack(thread: int, rank: int, time: float, since_ns: int = 0) -> StackReport:
    """Return where a thread is, and which collectives of this process have not ended.

    Args:
        thread: its identifier.
        rank: this process's.
        time: now, in seconds since the epoch.
        since_ns: leave out collectives that began before, in nanoseconds since the epoch.
    """
    stack, recorded = read_stack(thread), flight_recorder.read_recorder(since_ns)
    return StackReport(
        rank=rank,
        time=time,
        collective=find_collective(stack) or flight_recorder.name_wait(recorded),
        frames=describe_users_frames(stack),
        recorded=recorded,
    )


def make_pulse(rank: int, time: float, waiting: str = "") -> Pulse:
    """Return how far this process's training has come.

    Args:
        rank: this process's.
        time: now, in seconds since the epoch.
        waiting: the collective that the main thread is in, empty where it is in none.
    """
    pulse = Pulse(rank=rank, time=time, waiting=waiting, moment=monotonic())
    current = runtime.current()
    if current is None:
        return pulse
    epoch, batch, batches = current.gradient.position()
    return replace(pulse, steps=current.gradient.steps, epoch=epoch, batch=batch, batches=batches)
