"""What is said of a connection that ends; and what one is sent that takes a part of it at a time."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from notebook_accel.events import Lines
from notebook_accel.launch.engines.remote.client import CommandClient, Wanted
from notebook_accel.launch.engines.remote.link import Link
from notebook_accel.launch.engines.remote.transport import SocketTransport
from notebook_accel.stream.wire import FrameReader

WANTED = Wanted(python="3.11", torch="2.13.0", package="0.1", with_ipython=False, takes_over=False)


class Shell(CommandClient):
    """Runs commands of a shell where a host's agent would be."""

    program: ClassVar[str] = "ssh"
    connection: ClassVar[str] = "ssh connection"

    def __init__(self, text: str) -> None:
        self.text = text

    def make_command(self, *args: Any) -> list[str]:
        return ["sh", "-c", self.text]

    def explain_failure(self, *args: Any) -> str:
        raise NotImplementedError

    def find_telling_line(self, said: Sequence[str]) -> str:
        return said[-1] if said else ""


@pytest.mark.parametrize(
    ("commands", "told"),
    [
        ("sh -c 'kill -KILL $$'; exit 137", "the agent there was ended by SIGKILL"),
        (
            "echo 'error: oom_kill event' >&2; exit 137",
            "the agent there was ended by SIGKILL: error: oom_kill event",
        ),
        ("kill -TERM $$", "ssh was ended by SIGTERM"),
        ("echo 'Connection refused' >&2; exit 255", "Connection refused"),
        ("exit 3", "ssh ended with code 3"),
    ],
)
def test_an_end_is_told_by_who_has_ended(commands: str, told: str) -> None:
    link = Link.open(Shell(commands), "gpu1", None, WANTED)
    try:
        while not link.lost:
            assert select.select([link], [], [], 60)[0]
            link.receive()
        assert link.lost == f"its ssh connection has ended ({told})"
    finally:
        link.close()


def test_a_connection_takes_a_part_of_a_frame() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        theirs = socket.create_connection(listening.getsockname())
        ours, _ = listening.accept()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 5000)
    event = Lines(
        rank=0, time=0.0, stream="stdout", texts=tuple(str(number) * 50 for number in range(20_000))
    )
    theirs.settimeout(30)
    frames = FrameReader()
    link = Link(Shell(""), "10.0.0.1", None, SocketTransport(ours), facts={})
    with theirs, contextlib.closing(link):
        link.send(event)
        while not (received := frames.feed(theirs.recv(999))):
            link.flush()
    assert received == [event]
