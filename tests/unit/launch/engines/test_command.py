"""A place of the user's own: what is said of a command that is wrong, missing or fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from notebook_accel import notebook_launcher
from notebook_accel.launch.engines.command import CommandEngine

WORDS = ["sh", "-c", "echo {host} is no pod >&2; exit 3", "{script}"]


@pytest.mark.parametrize(
    "command", ["docker exec {host} {script}", ["docker", "{host}"], ["sh", "-c", "{script}"], []]
)
def test_a_command_without_host_or_script_is_refused(command: Sequence[str]) -> None:
    with pytest.raises(
        ValueError, match=r"a list of words is needed, with '{host}' and '{script}' among them"
    ):
        CommandEngine(command, ["a"])


def test_wrong_hosts_are_refused() -> None:
    with pytest.raises((ValueError, TypeError), match="hosts="):
        CommandEngine(WORDS, "a")


@pytest.mark.parametrize(
    ("engine", "more", "text"),
    [
        (
            CommandEngine(WORDS, ["a"]),
            {},
            "host a: sh ended with code 3, and no Python has started there (a is no pod)",
        ),
        (CommandEngine(["nowhere", *WORDS[1:]], ["a"]), {}, "there is no program 'nowhere' here"),
        (
            CommandEngine(WORDS, ["a"]),
            {"hosts": ["b"]},
            "hosts=['b'] with engine='command': it is for engine='ssh'",
        ),
        (
            CommandEngine(WORDS, ["a"], python={"b": "python3"}),
            {},
            "python= has 'b', which is none of the hosts",
        ),
    ],
)
def test_why_nothing_starts_is_said(engine: CommandEngine, more: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        notebook_launcher(print, engine=engine, **more)
    assert text in str(caught.value)


def test_launches_with_the_same_command_share_connections() -> None:
    first, second = CommandEngine(WORDS, ["a"]), CommandEngine(list(WORDS), ["b"])
    assert first._client == second._client and hash(first._client) == hash(second._client)
