"""What is said of a connection that ends."""

from __future__ import annotations

import select
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from notebook_accel.launch.engines.remote.client import CommandClient, Wanted
from notebook_accel.launch.engines.remote.link import Link

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
