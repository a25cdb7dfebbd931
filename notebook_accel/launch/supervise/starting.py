"""What joins workers that are being started with this process: sockets and pipes, and who keeps which ends."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Collection
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any, Final, Literal, TypeAlias

from ...stream.inbox import Channel, End
from ...stream.wire import PipeEnd
from .. import descriptors

OUTPUT_BY_PIPES: Final = sys.platform != "win32"
"""Elsewhere output comes as events: the ends of a pipe cannot be waited for."""
FORKS_AT_ONCE: Final = 8
"""Workers that are prepared before the first of them is forked."""
_Way: TypeAlias = Channel | Literal["lifeline"]


@dataclass(frozen=True, kw_only=True)
class WorkerEnds:
    """A worker's ends of what joins it with the notebook.

    Attributes:
        events: the socket for events and orders.
        stdout: the pipe for its output; None where that goes as events.
        stderr: likewise for its errors.
        lifeline: the pipe by which it hears that the notebook has ended.
    """

    events: socket.socket
    stdout: PipeEnd | None
    stderr: PipeEnd | None
    lifeline: PipeEnd


class Joint:
    """What joins one worker with this process."""

    def __init__(self) -> None:
        self._ours: dict[_Way, Any] = {}
        self._theirs: dict[_Way, Any] = {}

    def open(self, context: BaseContext) -> None:
        """Make the socket and the pipes.

        Args:
            context: of the start method, whose pipes these are.

        Raises:
            OSError: the system gives no further descriptor.
        """
        self._ours["events"], self._theirs["events"] = socket.socketpair()
        if OUTPUT_BY_PIPES:
            self._ours["stdout"], self._theirs["stdout"] = context.Pipe(duplex=False)
            self._ours["stderr"], self._theirs["stderr"] = context.Pipe(duplex=False)
        self._theirs["lifeline"], self._ours["lifeline"] = context.Pipe(duplex=False)

    @property
    def channels(self) -> dict[Channel, End]:
        """Our ends of what the worker sends."""
        return {way: end for way, end in self._ours.items() if way != "lifeline"}

    @property
    def lifeline(self) -> PipeEnd:
        """Our end of the pipe by which the worker hears that this process has ended."""
        end: PipeEnd = self._ours["lifeline"]
        return end

    @property
    def theirs(self) -> WorkerEnds:
        """The worker's ends."""
        return WorkerEnds(
            events=self._theirs["events"],
            stdout=self._theirs.get("stdout"),
            stderr=self._theirs.get("stderr"),
            lifeline=self._theirs["lifeline"],
        )

    def filenos(self, *, with_theirs: bool) -> list[int]:
        """Return the descriptors of our ends, and of the worker's."""
        ends = [*self._ours.values(), *(self._theirs.values() if with_theirs else ())]
        return [end.fileno() for end in ends]

    def close_theirs(self) -> None:
        """Close the worker's ends: it has its own copies, or none."""
        _close(self._theirs)

    def close(self) -> None:
        """Close all: there is no worker."""
        self.close_theirs()
        _close(self._ours)


def _close(ends: dict[_Way, Any]) -> None:
    while ends:  # none is in the list once it is closed: another thread may fork in between
        ends.popitem()[1].close()


class Starting:
    """The workers that this thread is starting.

    Each keeps its own ends of what joins it with this process; what other threads fork meanwhile keeps none.

    Attributes:
        begins: what joins the worker with this process whose process is being started.
    """

    def __init__(self) -> None:
        self.begins: Joint | None = None
        self._thread = threading.get_ident()
        self._joints: list[Joint] = []
        descriptors.keep_from_forks(self)

    def join(self, context: BaseContext) -> Joint:
        """Make what joins a worker with this process.

        Args:
            context: of the start method.

        Raises:
            OSError: the system gives no further descriptor; none is left open.
        """
        joint = Joint()
        self._joints.append(joint)
        try:
            joint.open(context)
        except BaseException:
            joint.close()
            raise
        return joint

    def filenos(self) -> list[int]:
        """Return the descriptors that no process keeps that is forked now."""
        own = self.begins if threading.get_ident() == self._thread else None
        return [fd for joint in self._joints for fd in joint.filenos(with_theirs=joint is not own)]

    def end(self, begun: Collection[Joint]) -> None:
        """Close the ends of the workers, and all of those that have not begun.

        Args:
            begun: what joins the others with this process.
        """
        for joint in self._joints:
            if joint in begun:
                joint.close_theirs()
            else:
                joint.close()
        descriptors.forget(self)
