"""Passes the events of ranks on to the notebook, and the notebook's orders to the processes of the ranks."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from ....events import (
    BeginOrder,
    Buffer,
    CallEnd,
    CallOrder,
    Ended,
    Event,
    Lines,
    Order,
    Result,
    SignalOrder,
)
from ....stream.inbox import Inbox
from ....stream.wire import GO, FrameError, describe_loss
from ...agent.client import AgentWorker
from ...leftovers import Leftovers, remove_abandoned
from .channel import Channel
from .rank_process import RankProcess

_LOOK_SECONDS: Final = 1.0
_BYTES: Final = 1 << 12


class Relay:
    """Passes on what the ranks on this machine say, and what the notebook says to them.

    When the notebook is gone, all processes are killed.

    Args:
        channel: the way to the notebook.
        obey: takes the notebook's orders that are for no rank.

    Attributes:
        has_lost_notebook: whether the notebook is gone.
    """

    def __init__(self, channel: Channel, obey: Callable[[Event], None]) -> None:
        self.has_lost_notebook = False
        self._channel = channel
        self._obey_other = obey
        self._processes: dict[int, RankProcess] = {}
        self._inbox = Inbox()
        self._leftovers = Leftovers()
        self._ended: list[AgentWorker] = []  # whose lifelines kill what is left
        self._looks: dict[int, Callable[[], None]] = {}
        self._wake_fd, self._woken_by = os.pipe()
        os.set_blocking(self._wake_fd, False)
        self._inbox.watch(channel.fileno())
        self.watch(self._wake_fd, self._note_wake)

    def add(self, rank: int, process: RankProcess) -> None:
        """Pass on what a process says from now on.

        Args:
            rank: the process's.
            process: it was just ordered.
        """
        self._processes[rank] = process
        ends = {"events": process.events, "stdout": process.stdout, "stderr": process.stderr}
        self._inbox.add(rank, ends)  # type: ignore[arg-type]
        self._inbox.watch(process.worker.fileno())

    def watch(self, fd: int, look: Callable[[], None]) -> None:
        """Call a function at each step, and begin a step when a descriptor can be read.

        Args:
            fd: the descriptor.
            look: called in the thread that calls `step`.
        """
        self._looks[fd] = look
        self._inbox.watch(fd)

    def unwatch(self, fd: int) -> None:
        """Stop watching a descriptor."""
        del self._looks[fd]
        self._inbox.unwatch(fd)

    def wake(self) -> None:
        """End the wait of `step`, from any thread."""
        os.write(self._woken_by, b"x")

    def _note_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_fd, _BYTES)

    @property
    def is_busy(self) -> bool:
        """Whether a process runs, or something that one has left."""
        return bool(self._processes or self._leftovers)

    def replace_channel(self, channel: Channel) -> Channel:
        """Serve another end from now on; return its channel. The one before learns that it is not served any more."""
        self._inbox.unwatch(self._channel.fileno())
        self._channel.close()
        self._channel = channel
        self._inbox.watch(channel.fileno())
        return channel

    def step(self, seconds: float = _LOOK_SECONDS) -> None:
        """Wait for news, so many seconds at most, and pass it on."""
        self._forward(self._inbox.poll(min(seconds, 0.02) if self._leftovers else seconds))
        self._listen()
        for look in list(self._looks.values()):
            look()
        for rank, process in list(self._processes.items()):
            process.worker.look()
            if process.exitcode is not None:
                self._note_end(rank, process, process.exitcode)
        self._leftovers.look()
        if not self._leftovers:
            self._let_go()

    def _note_end(self, rank: int, process: RankProcess, exitcode: int) -> None:
        worker, now = process.worker, time.time()
        if worker.pid:
            self._leftovers.end(worker.pid)  # what is left would write for ever
        self._forward(self._inbox.finish(rank))
        if worker.problem:
            self._forward([Lines(rank=rank, time=now, stream="stderr", texts=(worker.problem,))])
        self._forward([Ended(rank=rank, time=now, pid=worker.pid, exitcode=exitcode)])
        self._inbox.unwatch(worker.fileno())
        self._ended.append(worker)
        del self._processes[rank]

    def _let_go(self) -> None:
        while self._ended:
            self._ended.pop().close()

    def pass_on_rest(self) -> None:
        """Pass on what the processes have written so far; nothing of it is waited for."""
        rest = self._inbox.poll(0.0)
        self._forward([*rest, *(event for rank in self._processes for event in self._inbox.drain(rank))])

    def kill(self) -> None:
        """Kill all processes; `step` notes their ends."""
        for process in self._processes.values():
            process.send(signal.SIGKILL)

    def close(self) -> None:
        """Wait until nothing is left of what the processes started, and give everything back."""
        self._leftovers.finish()
        self._let_go()
        remove_abandoned()  # by killed ranks
        self._inbox.close()
        os.close(self._wake_fd)
        os.close(self._woken_by)

    def _forward(self, events: Sequence[Event]) -> None:
        if not events or self.has_lost_notebook:
            return
        try:
            self._channel.send([wrap_buffers(event) for event in events])
        except OSError:
            self._lose_notebook()

    def _listen(self) -> None:
        """Obey what the notebook says; where the notebook has left, kill the processes."""
        if self.has_lost_notebook:
            return
        try:
            orders = self._channel.receive()
        except FrameError as error:
            self._forward([describe_loss(rank, error, "the notebook") for rank in self._processes])
            self._lose_notebook()
            return
        except OSError:
            self._lose_notebook()
            return
        for order in orders:
            self._obey(order)

    def _lose_notebook(self) -> None:
        if not self.has_lost_notebook:
            self.has_lost_notebook = True
            self._inbox.unwatch(self._channel.fileno())
            self.kill()

    def _obey(self, order: Event) -> None:
        if isinstance(order, BeginOrder):
            self._inbox.tell_all(GO)
        elif isinstance(order, SignalOrder):
            if order.rank in self._processes:
                self._processes[order.rank].send(order.signum)
        elif order.rank < 0:
            self._obey_other(order)
        else:
            assert isinstance(order, Order), f"{order} is no order"
            wrapped = wrap_buffers(order)
            assert isinstance(wrapped, Order)
            self._inbox.tell(wrapped)


def wrap_buffers(event: Event) -> Event:
    """Return an event that has come as one that can be sent: memory that nobody may write to comes as a memoryview.

    Args:
        event: of any kind.
    """
    if isinstance(event, Result):
        return replace(event, buffers=_wrap(event.buffers))
    if isinstance(event, CallEnd) and isinstance(event.outcome, Result):
        return replace(event, outcome=replace(event.outcome, buffers=_wrap(event.outcome.buffers)))
    if isinstance(event, CallOrder):
        return replace(event, work=pickle.PickleBuffer(event.work), buffers=_wrap(event.buffers))
    return event


def _wrap(buffers: Sequence[Buffer]) -> list[Buffer]:
    return [part if isinstance(part, pickle.PickleBuffer) else pickle.PickleBuffer(part) for part in buffers]
