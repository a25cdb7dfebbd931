"""Hosts that are not there: a process speaks the wire protocol of the agents of many, without torch and without ranks.

In the notebook everything is real: engine, pool, links, group, record and view. `SimulatedEngine` gets its pipes from
`SimulatedCluster`, whose processes run this file. Each connection is two pipes, as with a program such as `ssh`.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from notebook_accel.events import (
    BeginOrder,
    Ended,
    Event,
    Failure,
    LeaveOrder,
    Lines,
    Metric,
    Phase,
    RaisedError,
    Result,
    SignalOrder,
    WriteOrder,
)
from notebook_accel.launch.engines.remote.keep_alive import KEEP_ALIVE, KEEP_ALIVE_SECONDS
from notebook_accel.launch.engines.remote.messages import (
    Assigned,
    AssignOrder,
    Cleared,
    ClearOrder,
    Prepared,
    PrepareOrder,
    Reached,
    ReachOrder,
)
from notebook_accel.stream.wire import FrameReader, frame_lines

if TYPE_CHECKING:
    from notebook_accel.launch.engines.remote.transport import Transport

MARK: Final = "notebook_accel:"
METRICS: Final = ("loss", "accuracy", "rate", "norm", "seconds")
_BYTES: Final = 1 << 16
_TEXT: Final = "step {step}: loss 0.1234 of rank {rank}, and some more words"


class Node:
    """The agent of one host, and its ranks.

    Args:
        number: of the host.
        incoming: descriptor that brings orders.
        outgoing: descriptor that takes events.
        facts: what it says first, as a line.
    """

    def __init__(self, number: int, incoming: int, outgoing: int, facts: bytes) -> None:
        self.number, self.incoming, self.outgoing = number, incoming, outgoing
        self.waiting = bytearray(facts)
        self.is_over = False
        self.next_beat, self.next_step = 0.0, float("inf")
        self._frames = FrameReader()
        self._ranks: list[int] = []
        self._step = 0

    def read(self) -> None:
        """Obey what has come."""
        try:
            data = os.read(self.incoming, _BYTES)
        except BlockingIOError:
            return
        if not data:
            self.is_over = True
            return
        for order in self._frames.feed(data):
            self._obey(order)

    def write(self) -> None:
        """Write what goes without waiting."""
        while self.waiting and not self.is_over:
            try:
                del self.waiting[: os.write(self.outgoing, self.waiting)]
            except OSError as error:
                self.is_over = error.errno != errno.EAGAIN
                return

    def beat(self, now: float) -> None:
        """Say that the agent lives."""
        self.next_beat = now + KEEP_ALIVE_SECONDS
        self.waiting += KEEP_ALIVE

    def step(self, now: float) -> None:
        """Let each rank write a line and log five metrics, once a second."""
        self.next_step = max(self.next_step + 1.0, now)
        self._step += 1
        stamp, step = time.time(), self._step
        for rank in self._ranks:
            values = dict.fromkeys(METRICS, rank + step / 10)
            text = _TEXT.format(step=step, rank=rank)
            self._say(Lines(rank=rank, time=stamp, stream="stdout", texts=(text,)))
            self._say(Metric(rank=rank, time=stamp, step=step, values=values))

    def fail(self, rank: int) -> None:
        """Let a rank raise."""
        error = RaisedError(type_name="ValueError", message=f"of rank {rank}", pickled=None, frames=())
        self._say(Failure(rank=rank, time=time.time(), pid=self._pid(rank), error=error))
        self._end(rank, 1)

    def finish(self, value: bytes) -> None:
        """Let all ranks return a pickled value."""
        for rank in list(self._ranks):
            self._say(Result(rank=rank, time=time.time(), value=value))
            self._end(rank, 0)

    def close(self) -> None:
        """Vanish."""
        self.is_over = True
        for fd in (self.incoming, self.outgoing):
            os.close(fd)

    def _obey(self, order: Event) -> None:
        now = time.time()
        if isinstance(order, PrepareOrder):
            self._say(Prepared(rank=-1, time=now, port=order.port or 29_500))
        elif isinstance(order, ReachOrder):
            self._say(Reached(rank=-1, time=now))
        elif isinstance(order, AssignOrder):
            self._ranks, self._step = [work.rank for work in order.works], 0
            self._say(Assigned(rank=-1, time=now, pids={rank: self._pid(rank) for rank in self._ranks}))
        elif isinstance(order, BeginOrder):
            for rank in self._ranks:
                self._say(Phase(rank=rank, time=now, name="running", pid=self._pid(rank)))
            self.next_step = time.monotonic() + (self.number * 0.618) % 1  # hosts are spread over the second
        elif isinstance(order, SignalOrder) and order.rank in self._ranks:
            self._end(order.rank, -order.signum)
        elif isinstance(order, ClearOrder):
            for rank in list(self._ranks):
                self._end(rank, -signal.SIGKILL)
            self._say(Cleared(rank=-1, time=now))
        else:
            assert isinstance(order, (SignalOrder, LeaveOrder, WriteOrder)), order

    def _end(self, rank: int, exitcode: int) -> None:
        self._ranks.remove(rank)
        self._say(Ended(rank=rank, time=time.time(), pid=self._pid(rank), exitcode=exitcode))

    def _pid(self, rank: int) -> int:
        return 100_000 + rank

    def _say(self, event: Event) -> None:
        for part in frame_lines([event]):
            self.waiting += part
        self.next_beat = time.monotonic() + KEEP_ALIVE_SECONDS


class Hosts:
    """All nodes of a process. It obeys JSON on a socket, and ends with it.

    Args:
        control: brings `connect` with two descriptors, `fail`, `vanish` and `finish`.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._nodes: dict[int, Node] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._due: list[tuple[float, int]] = []  # when to look at which node

    def run(self) -> None:
        """Serve until the notebook is gone."""
        while True:
            timeout = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
            touched: set[int] = set()
            for key, _ in self._selector.select(timeout):
                if key.data is None:
                    if not self._obey(touched):
                        return
                elif key.data in self._nodes:
                    self._nodes[key.data].read()
                    touched.add(key.data)
            self._tick(touched)
            for number in touched:
                self._flush(number)

    def _tick(self, touched: set[int]) -> None:
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            node = self._nodes.get(heapq.heappop(self._due)[1])
            if node is None:
                continue
            if node.next_beat <= now:
                node.beat(now)
            if node.next_step <= now:
                node.step(now)
            touched.add(node.number)

    def _flush(self, number: int) -> None:
        node = self._nodes.get(number)
        if node is None:
            return
        node.write()
        if node.is_over:
            self._drop(number)
            return
        soon = time.monotonic() + 0.01 if node.waiting else float("inf")
        heapq.heappush(self._due, (min(node.next_beat, node.next_step, soon), number))

    def _drop(self, number: int) -> None:
        node = self._nodes.pop(number)
        self._selector.unregister(node.incoming)
        node.close()

    def _obey(self, touched: set[int]) -> bool:
        data, fds, _, _ = socket.recv_fds(self._control, _BYTES, 2)
        if not data:
            return False
        order: dict[str, Any] = json.loads(data)
        numbers: list[int] = order["nodes"]
        if order["do"] == "connect":
            for fd in fds:
                os.set_blocking(fd, False)
            self._nodes[numbers[0]] = Node(numbers[0], *fds, order["facts"].encode())
            self._selector.register(fds[0], selectors.EVENT_READ, numbers[0])
        for number in numbers:
            if order["do"] == "vanish":
                self._drop(number)
            elif order["do"] == "fail":
                self._nodes[number].fail(order["rank"])
            elif order["do"] == "finish":
                self._nodes[number].finish(bytes.fromhex(order["value"]))
        touched.update(numbers)
        return True


class SimulatedCluster:
    """The processes that simulate hosts, as the notebook sees them.

    Args:
        processes: how many.
    """

    def __init__(self, processes: int = 2) -> None:
        self._controls: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for _ in range(processes):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                command = [sys.executable, "-m", "tests.benchmarks.simulated_hosts", str(theirs.fileno())]
                self._processes.append(
                    subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
                )
            self._controls.append(ours)

    @property
    def pids(self) -> list[int]:
        """The process ids."""
        return [process.pid for process in self._processes]

    def connect(self, number: int, facts: str) -> Transport:
        """Return the way to a host.

        Args:
            number: of the host.
            facts: the line that it says first.
        """
        from tests.benchmarks.simulated_engine import PipeTransport

        their_in, ours_out = os.pipe()
        ours_in, their_out = os.pipe()
        order = {"do": "connect", "nodes": [number], "facts": facts}
        socket.send_fds(self._find(number), [json.dumps(order).encode()], [their_in, their_out])
        os.close(their_in)
        os.close(their_out)
        return PipeTransport(ours_in, ours_out)

    def fail(self, node: int, rank: int) -> None:
        """Let a rank raise; it is on the node."""
        self._tell({"do": "fail", "rank": rank}, [node])

    def vanish(self, nodes: Sequence[int]) -> None:
        """Close the connections of nodes at once."""
        self._tell({"do": "vanish"}, nodes)

    def finish(self, nodes: Sequence[int], value: bytes) -> None:
        """Let the ranks of nodes return a pickled value."""
        self._tell({"do": "finish", "value": value.hex()}, nodes)

    def close(self) -> None:
        """End the processes."""
        for control in self._controls:
            control.close()
        for process in self._processes:
            process.wait()

    def _find(self, number: int) -> socket.socket:
        return self._controls[number % len(self._controls)]

    def _tell(self, order: dict[str, Any], nodes: Sequence[int]) -> None:
        for control in self._controls:
            if own := [number for number in nodes if self._find(number) is control]:
                control.send(json.dumps({**order, "nodes": own}).encode())


@contextlib.contextmanager
def simulate(processes: int = 2) -> Iterator[SimulatedCluster]:
    """Return processes that simulate hosts, for a block."""
    cluster = SimulatedCluster(processes)
    try:
        yield cluster
    finally:
        cluster.close()


if __name__ == "__main__":
    Hosts(socket.socket(fileno=int(sys.argv[1]))).run()
