"""The process of a rank on another machine: its variables, and what is told where it does not start."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence

import pytest

from notebook_accel.events import Ended, Event, Lines
from notebook_accel.launch.agent.client import Agent
from notebook_accel.launch.engines.remote.rank_process import (
    ProcessStart,
    RankProcess,
    Work,
    make_environment,
    start_agent,
)
from notebook_accel.launch.engines.remote.relay import Relay
from notebook_accel.launch.transfer.pickled import Pickled
from notebook_accel.launch.transfer.shared_memory import SharedPickle
from notebook_accel.trust import secret

START = ProcessStart(variables={"A": "b"}, path=[], directory="/", with_ipython=False)
WORK = Work(rank=0, variables={"C": "d"}, is_alone=True, address="127.0.0.1", sends_value=False, notes=b"")


class RecordingChannel:
    """A notebook that says nothing, and keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._ends = socket.socketpair()

    def fileno(self) -> int:
        return self._ends[0].fileno()

    def send(self, events: Sequence[Event]) -> None:
        self.events += events

    def receive(self) -> list[Event]:
        return []

    def close(self) -> None:
        for end in self._ends:
            end.close()


@pytest.fixture
def agent() -> Iterator[Agent]:
    """An agent that is stopped before it can start anything."""
    made = start_agent(sys.path, {}, with_ipython=False)
    os.kill(made.pid, signal.SIGSTOP)
    yield made
    made.end()


@pytest.fixture
def channel() -> Iterator[RecordingChannel]:
    with contextlib.closing(RecordingChannel()) as made:
        yield made


@pytest.fixture
def relay(agent: Agent, channel: RecordingChannel) -> Iterator[Relay]:
    """The relay of a process that was just ordered."""
    made = Relay(channel, lambda order: None)
    payload = SharedPickle(Pickled(data=b"x", buffers=[]))
    with contextlib.closing(payload), socket.create_server(("127.0.0.1", 0)) as store:
        made.add(0, RankProcess(agent, START, WORK, payload, path=[], store=store))
    yield made
    made.close()


def test_a_worker_gets_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """What starts its process may have been started by the process that has it."""
    monkeypatch.setenv(secret.VARIABLE, "correct horse battery staple")
    variables = make_environment(START, WORK, {"A": "less", "E": "f"})
    assert variables["A"] == "b" and variables["C"] == "d" and variables["E"] == "f"
    assert "PATH" in variables and secret.VARIABLE not in variables


def test_a_process_whose_agent_ends_is_told_as_killed(
    agent: Agent, channel: RecordingChannel, relay: Relay
) -> None:
    relay.step()
    assert not channel.events and relay.is_busy
    os.kill(agent.pid, signal.SIGKILL)
    while relay.is_busy:
        relay.step()
    why, end = channel.events
    assert isinstance(why, Lines) and why.stream == "stderr"
    assert "the agent, the process that starts workers, has ended" in why.texts[0]
    assert end == Ended(rank=0, time=end.time, pid=0, exitcode=-signal.SIGKILL)


def test_a_process_that_has_not_started_is_not_waited_for(channel: RecordingChannel, relay: Relay) -> None:
    relay.kill()
    relay.step()
    [end] = channel.events
    assert end == Ended(rank=0, time=end.time, pid=0, exitcode=-signal.SIGKILL)
    assert not relay.is_busy
