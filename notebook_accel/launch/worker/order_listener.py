"""In a worker: the thread that obeys the notebook's orders and reports how far the training has come."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from time import monotonic
from typing import Final

from ... import runtime
from ...events import (
    Event,
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
from ...stream.wire import FrameError, FrameReader, describe_loss
from . import flight_recorder
from .stacks import BACKWARD, StackWatch

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
    """

    def __init__(
        self,
        events: socket.socket,
        emitter: Emitter,
        stop_point: StopPoint,
        obey: Callable[[Order], None] | None = None,
        write_out: Callable[[], None] | None = None,
        thread: int | None = None,
    ) -> None:
        self._obey_other = obey
        self._write_out = write_out
        self._events = events
        self._emitter = emitter
        self._stop_point = stop_point
        self._frames = FrameReader()
        self._stacks = StackWatch(thread or threading.get_ident())
        self._last: Pulse | None = None
        self._next_pulse = monotonic() + _INTERVAL
        threading.Thread(target=self._run, name="notebook_accel listener", daemon=True).start()

    def _run(self) -> None:
        """Obey until the notebook is gone, and the lifeline ends this worker; or until nothing can be heard of it."""
        try:
            while (orders := self._hear()) is not None:
                for order in orders:
                    self._try(self._obey, order)
        except FrameError as error:
            for order in error.events:
                self._try(self._obey, order)
            loss = describe_loss(self._emitter.rank, error, "the notebook")
            with contextlib.suppress(OSError, ValueError):  # stderr may be closed
                print(f"rank {loss.rank} hears no more orders: {loss.lost}", file=sys.stderr, flush=True)
        except (OSError, ValueError):
            pass  # the connection was reset, or a script has closed all descriptors
        finally:
            if self._obey_other is not None:  # nobody will tell it any more
                self._try(self._obey_other, LeaveOrder(rank=self._emitter.rank, time=self._emitter.now()))

    def _hear(self) -> list[Event] | None:
        """Wait for orders for a moment, and return them; None where the notebook is gone."""
        if not wait_readable(self._events, _INTERVAL if self._write_out is None else _WRITE_INTERVAL):
            if self._write_out is not None:
                self._try(self._write_out)
            if monotonic() >= self._next_pulse:
                self._next_pulse = monotonic() + _INTERVAL
                self._try(self.send_pulse)
            return []
        data = self._events.recv(_BYTES)
        return self._frames.feed(data) if data else None

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
            if self._write_out is not None:
                self._write_out()
        elif isinstance(order, StackOrder) and not order.call:
            self._report_stack()
        elif isinstance(order, Order) and self._obey_other is not None:
            self._obey_other(order)
        else:
            assert not isinstance(order, Order), f"nobody obeys {order}"

    def _report_stack(self) -> None:
        emitter = self._emitter
        emitter.emit(report_stack(self._stacks, emitter.rank, emitter.now()))

    def send_pulse(self) -> None:
        """Send a pulse where something changed."""
        emitter = self._emitter
        collective = self._stacks.look().collective
        pulse = make_pulse(emitter.rank, emitter.now(), "" if collective == BACKWARD else collective)
        if self._last is None or _drop_time(pulse) != _drop_time(self._last):
            self._last = pulse
            emitter.emit(pulse)


def report_stack(stacks: StackWatch, rank: int, time: float, call: int = 0, since_ns: int = 0) -> StackReport:
    """Return where a thread is, and which collectives of this process have not ended.

    Args:
        stacks: looks at the thread.
        rank: this process's.
        time: now, in seconds since the epoch.
        call: of a session, by its number.
        since_ns: when the call began, in nanoseconds since the epoch.
    """
    stack, recorded = stacks.look(), flight_recorder.read_recorder(since_ns)
    return StackReport(
        rank=rank,
        time=time,
        call=call,
        collective=stack.collective or flight_recorder.name_wait(recorded),
        seconds=stack.seconds,
        frames=stack.frames,
        recorded=recorded,
    )


def make_pulse(rank: int, time: float, waiting: str = "") -> Pulse:
    """Return how far this process's training has come.

    Args:
        rank: this process's.
        time: now, in seconds since the epoch.
        waiting: the collective that the main thread is in, empty where it is in none.
    """
    current = runtime.current()
    if current is None:
        return Pulse(rank=rank, time=time, waiting=waiting, moment=monotonic())
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
        moment=monotonic(),
    )


def _drop_time(pulse: Pulse) -> tuple[object, ...]:
    return pulse.steps, pulse.epoch, pulse.batch, pulse.batches, pulse.waiting
