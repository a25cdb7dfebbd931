"""Ranks on hosts that the user's own ssh client reaches; nothing has to run there, and no port here is opened."""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, TypeVar

from .... import interrupts
from ....errors import LaunchError
from ....stream.record import RunRecord
from ...checks.addresses import is_loopback
from ...job import Job
from ...supervise.control import Control
from ...supervise.delivery import Deliver
from ..base import Outcome
from ..command import CommandEngine, count_ranks
from ..detached.engine import DetachingEngine
from ..detached.folder import Folder, list_parts
from ..remote.client import Wanted
from ..remote.driver import HostFacts, Work
from ..remote.host_run import HostFolder, HostWatch
from ..remote.hosts_engine import copy, uses_cpu
from ..remote.link import Link
from ..remote.messages import Driven, DriveOrder, Joined, JoinOrder
from ..remote.pool import get_pool
from .command import SshClient

_LOOK_SECONDS: Final = 0.1

AnswerT = TypeVar("AnswerT", Driven, Joined)


class SshEngine(CommandEngine, DetachingEngine):
    """Starts ranks on several hosts by the user's own OpenSSH client.

    Its config, agent, jump hosts and ControlMaster count. A connection stays open for the next launch.

    Args:
        hosts: `host`, `user@host` or `host:4` for four ranks; without a number a host has a rank for each GPU, or one.
            None is what the launch says.
        python: path of the Python on all hosts, or a dict of those by host. None tries the path of this process's, then
            `python3` and `python`.
        ssh: the client, and options for it: `("ssh", "-F", "config")`.

    Raises:
        ValueError, TypeError: an argument is wrong.
    """

    name = "ssh"
    refuses: ClassVar[Mapping[str, str]] = {
        "num_nodes": "hosts= says which machines, and this notebook drives them all",
        "address": "hosts= says where the ranks run",
        "tpu_mode": "ranks on hosts use GPUs or CPUs",
        "secret": "what is said between notebook and hosts goes through ssh, which proves both ends",
    }

    def __init__(
        self,
        hosts: Sequence[str] | None = None,
        *,
        python: str | Mapping[str, str] | None = None,
        ssh: str | Sequence[str] = "ssh",
    ) -> None:
        words = (ssh,) if isinstance(ssh, str) else tuple(ssh)
        self._set(SshClient(words), words[0], hosts, python)

    def find_problem(self) -> str:
        """Return that there is no client, and where it comes from."""
        problem = super().find_problem()
        return (
            f"{problem}: install OpenSSH's client (openssh-client of apt, openssh-clients of dnf)"
            if problem
            else ""
        )

    # -- runs that outlive the notebook

    _remark = ""

    def run(self, job: Job, record: RunRecord, deliver: Deliver, control: Control) -> Outcome:
        """Run the job to its end; one that is detached is driven by a process on its first host."""
        run = self.run_detached if self.outlives(job) else super().run
        return run(job, record, deliver, control)

    def detach(self, job: Job, record: RunRecord) -> Folder:
        """Start the process that drives a run, and let the agents of all hosts serve it."""
        hosts = self._find_hosts(job.options)[0]
        pythons = self._choose_pythons(hosts, job.options)
        pickled, origin = self.take(job)
        options = {**job.options, "hosts": [host.name for host in hosts]}
        pool = get_pool()
        links = pool.open(self._client, pythons, Wanted.here(), lambda: None)
        try:
            work = Work(
                job=list_parts(replace(job, options=options)),
                pickled=copy(pickled),
                origin=origin,
                hosts=[HostFacts(name=each.host, facts=each.facts, devices=each.devices) for each in links],
                counts=count_ranks(hosts, links, uses_cpu(job.environment)),
            )
            data = pickle.PickleBuffer(pickle.dumps(work))
            links[0].send(DriveOrder(rank=-1, time=time.time(), work=data))
            driven = _wait_for(links[0], Driven)
            self._remark = driven.remark
            for number in reversed(range(len(links))):
                if number == 0:  # the last word: from now on it goes on, whatever becomes of this process
                    name = hosts[0].name
                    self._folder = HostFolder(self._client, name, pythons[name], driven.number)
                links[number].send(_make_join_order(driven, links[0], number))
                _wait_for(links[number], Joined)
        except LaunchError:
            self._folder = None
            raise
        finally:
            for link in links:
                pool.put(link, is_clean=False)
        assert self._folder is not None
        return self._folder

    def describe_detached_launch(self, job: Job) -> Sequence[str]:
        """Return how the run is launched, and what may end it all the same."""
        return [*super().describe_detached_launch(job), self._remark]

    def open_folder(
        self, run: str | None, hosts: Sequence[str] | None, python: str | Mapping[str, str] | None
    ) -> HostFolder:
        """Return the folder of a run that is on the first of some hosts.

        Args:
            run: its number or name; None is the one that was launched last.
            hosts: as at the launch; None is what the engine says.
            python: see `hosts`.

        Raises:
            LaunchError: the host cannot be reached, or knows nothing of the run.
        """
        found, problems = self._find_hosts({"hosts": hosts, "python": python})
        if problems:
            raise LaunchError("\n".join(problems))
        host = found[0].name
        folder = HostFolder(self._client, host, self._choose_pythons(found, {"python": python})[host], run)
        folder.open()
        return folder

    def make_watch(self, folder: Folder, record: RunRecord, deliver: Deliver, control: Control) -> HostWatch:
        """Return what shows the run."""
        return HostWatch(folder, record, deliver, control)

    def describe_work(self, job: Job) -> str:
        """Return how many processes run what, and where."""
        count = "1 process" if job.local_world_size == 1 else f"{job.local_world_size} processes"
        hosts: Any = self._hosts or job.options.get("hosts") or ()
        return f"{job.name} on {count} by {self._client.program}: {', '.join(map(str, hosts))}"


def _make_join_order(driven: Driven, first: Link, number: int) -> JoinOrder:
    """Return the order for a host to connect to the first one, at any of its addresses."""
    reached = str(first.facts.get("address", ""))
    addresses = [] if not reached or is_loopback(reached) else [reached]
    addresses += [*first.facts.get("addresses", ()), "127.0.0.1"]
    return JoinOrder(
        rank=-1,
        time=time.time(),
        addresses=list(dict.fromkeys(addresses)),
        port=driven.port,
        token=driven.token,
        number=number,
    )


def _wait_for(link: Link, kind: type[AnswerT]) -> AnswerT:
    """Return the answer of a host; LaunchError where it has none."""
    while not link.lost:
        link.wait(_LOOK_SECONDS)
        interrupts.obey_interrupt()
        for event in link.receive():
            if isinstance(event, kind):
                if event.problem:
                    raise LaunchError(f"host {link.host}: {event.problem}")
                return event
    raise LaunchError(f"host {link.host}: {link.lost}")
