"""What an agent is asked for, on its way."""

from __future__ import annotations

import os
import resource
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from notebook_accel.launch.agent import orders
from notebook_accel.launch.agent.modules import Modules
from notebook_accel.launch.agent.orders import ImportOrder, Limits, WorkerOrder
from notebook_accel.launch.transfer.shared_memory import write_unnamed


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def receive(connection: socket.socket, opened: ExitStack) -> tuple[Any, list[int]]:
    order, fds = orders.receive(connection)
    for fd in fds:
        opened.callback(os.close, fd)
    return order, fds


def test_an_order_brings_its_descriptors(pair: tuple[socket.socket, socket.socket]) -> None:
    """Also more than the system takes in a message; and what follows it is no part of it."""
    imports = ImportOrder(modules=Modules(versions={}), environment={"A": "1"}, path=["/a"])
    first, second, third = kept = [write_unnamed(b"") for _ in range(3)]
    sent = [first, *[second] * 600, third]
    order = WorkerOrder(
        rank=3,
        environment={"LARGE": "x" * 1_000_000},
        directory="/",
        limits=Limits.capture(),
        imports=imports,
        num_fds=len(sent) + 1,
    )

    def send() -> None:
        orders.send(pair[0], order, sent)
        orders.send(pair[0], imports)
        pair[0].shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send)
    sender.start()
    with ExitStack() as opened:
        for fd in kept:
            opened.callback(os.close, fd)
        found, fds = receive(pair[1], opened)
        assert found == order and len(fds) == len(sent) + 1
        assert all(os.path.samestat(os.fstat(a), os.fstat(b)) for a, b in zip(fds[1:], sent, strict=True))
        assert not any(map(os.get_inheritable, fds))
        assert orders.read(fds[0]) == order, "as often as it is asked for"
        assert receive(pair[1], opened)[0] == imports
        with pytest.raises(EOFError):
            orders.receive(pair[1])
    sender.join()


def test_limits_are_adopted_as_far_as_the_system_allows() -> None:
    before = Limits.capture()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    pid = os.fork()
    if pid == 0:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
            os.umask(0o123)
            changed = Limits.capture()
            assert changed != before
            above = [(kind, hard + 1, hard + 1) for kind, _, hard in before.resources if hard >= 0]
            Limits(
                resources=above, cores=[1 << 14], umask=None
            ).adopt()  # none of them: another machine has more
            before.adopt()
            os._exit(0 if Limits.capture() == before else 3)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    if sys.platform == "linux":
        assert before.cores and before.umask is not None
