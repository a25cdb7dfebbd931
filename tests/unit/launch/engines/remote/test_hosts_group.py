"""What is told of ranks on hosts: the host of a process, and of what is missing there."""

from __future__ import annotations

from typing import Any, cast

import pytest

from notebook_accel.events import CallEnd, Failure, RaisedError
from notebook_accel.launch.engines.remote import hosts_group
from notebook_accel.launch.engines.remote.hosts_group import HostsWorkerGroup
from notebook_accel.launch.transfer import failures


class Client:
    host_noun = "host"


class FakeLink:
    """A connection to a host, as far as events of it are told."""

    client = Client

    def __init__(self, host: str, machine: str) -> None:
        self.host, self.facts = host, {"machine": machine}


def make_group(*links: FakeLink) -> Any:
    """Return a group with two ranks on each host, on the machine `here`."""
    group: Any = HostsWorkerGroup.__new__(HostsWorkerGroup)
    group._machine = "here"
    group._ranks = {link: range(2 * number, 2 * number + 2) for number, link in enumerate(links)}
    return group


@pytest.mark.parametrize(
    ("machines", "node"), [(["a", "b"], "gpu1"), (["here", "here"], "gpu1"), (["a"], "gpu0"), (["here"], "")]
)
def test_a_process_is_told_with_its_host(machines: list[str], node: str) -> None:
    links = [FakeLink(f"gpu{number}", machine) for number, machine in enumerate(machines)]
    rank = 2 * len(machines) - 1
    group = make_group(*links)
    failure = Failure(rank=rank, time=1.0, pid=7, exitcode=-9)
    call = CallEnd(rank=rank, time=1.0, call=1, outcome=failure, positions=None)
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
