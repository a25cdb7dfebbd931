"""What is told of ranks on hosts: the host of a process, and of what is missing there; and what many hosts cost."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from notebook_accel.events import CallEnd, Event, Failure, LeaveOrder, RaisedError
from notebook_accel.launch.engines.remote import hosts_group
from notebook_accel.launch.engines.remote.hosts_group import HostsWorkerGroup
from notebook_accel.launch.engines.remote.messages import Prepared, Reached, ReachOrder
from notebook_accel.launch.transfer import failures


class Client:
    host_noun = "host"


class ToldLink:
    """A connection to a host, as far as events of it are told."""

    client = Client
    devices = None

    def __init__(self, host: str, machine: str) -> None:
        self.host = self.node = host
        self.facts = {"machine": machine}


def make_group(*links: ToldLink) -> Any:
    """Return a group with two ranks on each host, on the machine `here`."""
    group: Any = HostsWorkerGroup.__new__(HostsWorkerGroup)
    group._machine = "here"
    group._ranks = {link: range(2 * number, 2 * number + 2) for number, link in enumerate(links)}
    group._link_of = {rank: link for link, ranks in group._ranks.items() for rank in ranks}
    group._places = group._place_ranks()
    return group


@pytest.mark.parametrize(
    ("machines", "node"), [(["a", "b"], "gpu1"), (["here", "here"], "gpu1"), (["a"], "gpu0"), (["here"], "")]
)
def test_a_process_is_told_with_its_host(machines: list[str], node: str) -> None:
    links = [ToldLink(f"gpu{number}", machine) for number, machine in enumerate(machines)]
    rank = 2 * len(machines) - 1
    group = make_group(*links)
    failure = Failure(rank=rank, time=1.0, pid=7, exitcode=-9)
    call = CallEnd(rank=rank, time=1.0, call=1, outcome=failure, collectives=None)
    told = [group._adapt(failure, links[-1]), group._adapt(call, links[-1]).outcome]
    who = f"rank {rank} ({f'on {node}, ' if node else ''}process 7)"
    for each in told:
        assert failures.describe_failure(cast(Failure, each)).startswith(f"{who} was ended by SIGKILL")


def test_what_is_missing_is_told_with_its_host() -> None:
    def note(kind: str, message: str) -> str:
        error = hosts_group._add_host(
            RaisedError(type_name=kind, message=message, pickled=None, frames=(), notes=("own",)),
            3,
            "host gpu2",
        )
        assert error is not None and error.notes[0] == "own"
        return " ".join(error.notes[1:])

    assert note("FileNotFoundError", "x").startswith("rank 3 is on host gpu2, and the file is not there")
    assert note("ModuleNotFoundError", "x").startswith("rank 3 is on host gpu2, and the module is not there")
    assert note("RuntimeError", "open: No such file or directory").startswith("rank 3 is on host gpu2")
    assert note("ValueError", "x") == ""


class FakeLink:
    """A connection whose pipe may have something."""

    lost = ""
    has_outgoing = False

    def __init__(self) -> None:
        self.ours, self.theirs = os.pipe()
        self.looks = 0
        self.sent: list[Event] = []

    def fileno(self) -> int:
        return self.ours

    def receive(self) -> list[Event]:
        self.looks += 1
        os.set_blocking(self.ours, False)
        with contextlib.suppress(BlockingIOError):
            os.read(self.ours, 1)
        return []

    def send(self, event: Event) -> None:
        self.sent.append(event)

    def close(self) -> None:
        os.close(self.ours)
        os.close(self.theirs)


def test_news_of_a_host_costs_no_look_at_the_others() -> None:
    links = [FakeLink() for _ in range(50)]
    group: Any = object.__new__(hosts_group.HostsWorkerGroup)
    with contextlib.ExitStack() as stack:
        group._selector = stack.enter_context(selectors.DefaultSelector())
        group._selecting, group._links, group._looked = threading.Lock(), links, math.inf
        group._ranks = {}
        group._link_of = dict(enumerate(links))
        for link in links:
            stack.callback(link.close)
            group._selector.register(link, selectors.EVENT_READ, link)
        os.write(links[7].theirs, b"x")
        assert group.receive(0.0) == []
        assert [number for number, link in enumerate(links) if link.looks] == [7]
        group.tell(LeaveOrder(rank=9, time=0.0))
        assert [number for number, link in enumerate(links) if link.sent] == [9]
        group._looked = -math.inf
        group.receive(0.0)
        assert all(link.looks for link in links), "now and then those that say nothing are looked at too"


def test_one_of_several_connections_to_a_node_tries_to_reach_the_others() -> None:
    """Each would be one connection more to the first node, where nobody accepts them yet."""
    links = [ToldLink(f"gpu{number // 3}", "there") for number in range(6)]
    group = make_group(*links)
    group._links, group._start = links, SimpleNamespace(variables={})
    group._job = SimpleNamespace(rendezvous=SimpleNamespace(port=0))
    sent: list[tuple[Any, Event]] = []
    group._send = lambda link, event: sent.append((link, event))
    answers = {
        Prepared: [Prepared(rank=-1, time=0.0, port=7000 + number) for number in range(6)],
        Reached: [],
    }
    group._wait_for = lambda kind, asked: answers[kind]
    assert group._meet(["10.0.0.1"] * 3 + ["10.0.0.2"] * 3) == 7000
    asked = [
        (link, [place.port for place in order.places])
        for link, order in sent
        if isinstance(order, ReachOrder)
    ]
    assert asked == [(links[0], [7003]), (links[3], [7000])]
