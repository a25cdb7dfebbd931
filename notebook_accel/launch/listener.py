"""In a worker: the thread that hears the notebook's orders and tells how far the training has come."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from typing import Final

from .. import runtime
from ..events import Held, HoldOrder, Order, Pulse, StopOrder, Where, WhereOrder
from ..stopping import StopPoint
from ..stream.emit import Emitter
from ..stream.wire import FrameReader
from . import flight
from .whereabouts import BACKWARD, Whereabouts

_INTERVAL: Final = 0.5
_BYTES: Final = 1 << 16


class Listener:
    """Answers orders as they come, and sends a pulse where something changed since the last one.

    It reads what the training notes for itself anyway, so that the training pays nothing for it. Orders that it does
    not know go to `obey`.
    """

    def __init__(
        self,
        events: socket.socket,
        emitter: Emitter,
        stop_point: StopPoint,
        obey: Callable[[Order], None] | None = None,
    ) -> None:
        self._obey_other = obey
        self._events = events
        self._emitter = emitter
        self._stop_point = stop_point
        self._frames = FrameReader()
        self._whereabouts = Whereabouts(threading.get_ident())
        self._last: Pulse | None = None
        threading.Thread(target=self._run, name="notebook_accel listener", daemon=True).start()

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self._events], [], [], _INTERVAL)
            if not ready:
                self.tell()
                continue
            try:
                data = self._events.recv(_BYTES)
            except ConnectionResetError:
                return
            if not data:
                return  # the notebook is gone; the lifeline ends this worker
            for order in self._frames.feed(data):
                self._obey(order)

    def _obey(self, order: object) -> None:
        emitter = self._emitter
        if isinstance(order, HoldOrder):
            questions = self._stop_point.hold()
            emitter.emit(Held(rank=emitter.rank, time=emitter.now(), questions=questions))
        elif isinstance(order, StopOrder):
            self._stop_point.set(order.question)
        elif isinstance(order, WhereOrder) and not order.call:
            self._say_where()
        elif isinstance(order, Order) and self._obey_other is not None:
            self._obey_other(order)
        else:
            assert not isinstance(order, Order), f"nobody obeys {order}"

    def _say_where(self) -> None:
        emitter, seen = self._emitter, self._whereabouts.look()
        emitter.emit(
            Where(
                rank=emitter.rank,
                time=emitter.now(),
                collective=seen.collective,
                seconds=seen.seconds,
                frames=seen.frames,
                recorded=flight.recorded(),
            )
        )

    def tell(self) -> None:
        """Send a pulse where something changed."""
        emitter = self._emitter
        collective = self._whereabouts.look().collective
        pulse = pulse_of(emitter.rank, emitter.now(), "" if collective == BACKWARD else collective)
        if self._last is None or _content(pulse) != _content(self._last):
            self._last = pulse
            emitter.emit(pulse)


def pulse_of(rank: int, time: float, waiting: str = "") -> Pulse:
    """Return how far this process's training has come."""
    current = runtime.current()
    if current is None:
        return Pulse(rank=rank, time=time, waiting=waiting)
    flags = current.gradient
    epoch, batch, batches = flags.position()
    return Pulse(
        rank=rank,
        time=time,
        steps=flags.steps,
        epoch=epoch,
        batch=batch,
        batches=batches,
        waiting=waiting,
    )


def _content(pulse: Pulse) -> tuple[object, ...]:
    return pulse.steps, pulse.epoch, pulse.batch, pulse.batches, pulse.waiting
