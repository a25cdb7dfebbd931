"""The silent connection of a node: what its end says. tests/nodes cuts real cables."""

from __future__ import annotations

import errno
import socket
import sys
from typing import Any, cast

import pytest

from notebook_accel import runtime
from notebook_accel.launch.engines.nodes import pulse
from notebook_accel.launch.engines.nodes.pulse import Pulse


class Connection:
    """A connection whose other end does what is given."""

    def __init__(self, end: OSError | bytes) -> None:
        self.end = end

    def recv(self, size: int) -> bytes:
        if isinstance(self.end, OSError):
            raise self.end
        return self.end

    def setsockopt(self, *option: int) -> None:
        pass

    def shutdown(self, how: int) -> None:
        pass

    def close(self) -> None:
        pass

    def fileno(self) -> int:
        return -1


@pytest.mark.parametrize(
    ("end", "is_cut"),
    [
        (OSError(errno.ETIMEDOUT, "no answer"), True),
        (OSError(errno.EHOSTUNREACH, "no route"), True),
        (ConnectionResetError(errno.ECONNRESET, "closed for another one"), False),
        (b"", False),
    ],
    ids=["no answer", "no route", "closed for another one", "closed"],
)
def test_a_machine_that_does_not_answer_is_told(end: OSError | bytes, is_cut: bool) -> None:
    told: list[bool] = []
    watching = Pulse(cast(socket.socket, Connection(end)), lambda: told.append(True))
    watching._waiting.join()
    watching.close()
    assert told == [True] * is_cut


def test_no_fork_keeps_it() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        watching = Pulse(ours, lambda: None)
        assert watching in runtime.owners() and watching.filenos() == [ours.fileno()]
        watching.close()
    assert watching not in runtime.owners() and watching.filenos() == []


@pytest.mark.skipif(sys.platform != "linux", reason="the system has other names for it")
def test_a_cut_is_told_after_ten_seconds_and_before_fifteen() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as end,
    ):
        pulse.watch_network(end)

        def read(name: str) -> Any:
            return end.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))

        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        interval, count = read("TCP_KEEPINTVL"), read("TCP_KEEPCNT")
        last_question = read("TCP_KEEPIDLE") + interval * (count - 1)  # that can be answered
        assert last_question - interval > 10, "the network may go down just before a question"
        assert last_question + interval + 1 < 15, "which leaves time to end what runs"
        assert not read("TCP_USER_TIMEOUT"), "it would count in place of the questions"
