"""Ranks on hosts that a command of the user's reaches: a program of this machine with pipes to what it starts there."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from ... import environ, interrupts
from ...config.hosts import Host, check_hosts, check_python, parse_hosts
from ...devices import DeviceKind
from ...errors import LaunchError
from ..job import Job
from .attempts import Wait
from .nodes.waiting import read_join_seconds
from .remote.client import CommandClient, Wanted, make_script
from .remote.hosts_engine import HostsEngine, check_devices, uses_cpu
from .remote.hosts_group import Lender, Plan
from .remote.link import Link
from .remote.pool import UnfitHostError, get_pool

_PAUSE_SECONDS: Final = 2.0
_LOOK_SECONDS: Final = 0.1
_HOST, _SCRIPT = "{host}", "{script}"


@dataclass(frozen=True)
class WordsClient(CommandClient):
    """A command that runs a shell's script on a host, and passes its input and output on.

    Attributes:
        words: of the command, with `{host}` and `{script}`.
    """

    words: tuple[str, ...]
    connection: ClassVar[str] = "connection"

    @property
    def program(self) -> str:  # type: ignore[override]
        """What runs here."""
        return self.words[0]

    def make_command(self, host: str, python: str | None, nonce: str, wanted: Wanted) -> list[str]:
        """Return the command that starts the agent on a host."""
        script = make_script(python, nonce, wanted, self.warm_seconds)
        return [script if word == _SCRIPT else word.replace(_HOST, host) for word in self.words]

    def explain_failure(self, host: str, code: int | None, said: Sequence[str]) -> str:
        """Return why no agent has started, as a sentence."""
        how = "still runs" if code is None else f"ended with code {code}"
        telling = self.find_telling_line(said) or "it says nothing"
        return f"host {host}: {self.program} {how}, and no Python has started there ({telling})"

    def find_telling_line(self, said: Sequence[str]) -> str:
        """Return the last line of the command's errors."""
        return next((line.strip() for line in reversed(said) if line.strip()), "")


class CommandEngine(HostsEngine):
    """Starts ranks on hosts, containers or pods that a command reaches.

    `CommandEngine(["docker", "exec", "-i", "{host}", "sh", "-c", "{script}"], ["a:2", "b:2"])` has two ranks in each of
    two containers. Each needs a Python with the same version of torch and of this package, and the ranks connect to
    each other directly.

    Args:
        command: its words. `{host}` stands for the host, and the word `{script}` for a script that a POSIX shell there
            is to run; its input and output are those of the command.
        hosts: where ranks run, by the names that the command knows: `host`, or `host:4` for four ranks; without a
            number a host has a rank for each GPU, or one.
        python: path of the Python there, or a dict of those by host. None tries the path of this process's, then
            `python3` and `python`.

    Raises:
        ValueError, TypeError: an argument is wrong.
    """

    name = "command"
    refuses: ClassVar[Mapping[str, str]] = {
        "num_nodes": "its hosts say which machines, and this notebook drives them all",
        "address": "its hosts say where the ranks run",
        "tpu_mode": "ranks on hosts use GPUs or CPUs",
        "secret": "what is said between notebook and hosts goes through its command",
    }

    def __init__(
        self,
        command: Sequence[str],
        hosts: Sequence[str],
        *,
        python: str | Mapping[str, str] | None = None,
    ) -> None:
        if isinstance(command, str) or _SCRIPT not in command or not any(_HOST in word for word in command):
            raise ValueError(
                f"command={command!r}: a list of words is needed, with {_HOST!r} and {_SCRIPT!r} among them"
            )
        self._set(WordsClient(tuple(command)), command[0], hosts, python)

    def _set(
        self,
        client: CommandClient,
        program: str,
        hosts: Sequence[str] | None,
        python: str | Mapping[str, str] | None,
    ) -> None:
        for problem in (*check_hosts("hosts", hosts), *check_python("python", python)):
            raise problem
        self._client, self._program = client, program
        self._hosts, self._python = hosts, python

    def find_problem(self) -> str:
        """Return why the command cannot be called; empty where it can."""
        search = environ.get("PATH")
        is_there = shutil.which(self._program, path=os.defpath if search is None else search) is not None
        return "" if is_there else f"engine={self.name!r}: there is no program {self._program!r} here"

    def count(self, options: Mapping[str, Any], kind: DeviceKind) -> int:
        """Return how many ranks the hosts have."""
        hosts, problems = self._find_hosts(options)
        if problems:
            raise LaunchError("\n".join(problems))
        if all(host.count is not None for host in hosts):
            return sum(host.count or 0 for host in hosts)
        environment = options["environment"] or {}
        with self._borrow(hosts, options) as links:
            return sum(count_ranks(hosts, links, uses_cpu(environment)))

    def problems(self, job: Job) -> Sequence[str]:
        """Return why hosts cannot be used, a sentence for each problem of each of them."""
        hosts, problems = self._find_hosts(job.options)
        if problems:
            return problems
        try:
            with self._borrow(hosts, job.options) as links:
                return _check_counts(job, hosts, links)
        except LaunchError as error:
            return str(error).splitlines()

    def count_ranks(self, job: Job) -> list[int]:
        """Return the number of ranks of each host."""
        hosts = self._find_hosts(job.options)[0]
        with self._borrow(hosts, job.options) as links:
            return count_ranks(hosts, links, uses_cpu(job.environment))

    def make_lender(self, job: Job) -> Lender:
        """Return what has the hosts of a run."""
        pythons = self._choose_pythons(self._find_hosts(job.options)[0], job.options)
        return _Hosts(self._client, pythons, read_join_seconds(job.rendezvous.settings or {}))

    def describe_launch(self, job: Job, plan: Plan) -> str:
        """Return how many ranks start on which hosts."""
        hosts = self._find_hosts(job.options)[0]
        count = job.local_world_size
        places = ", ".join(f"{host.name} ({ranks})" for host, ranks in zip(hosts, plan.counts, strict=True))
        news = [get_pool().is_news((self._client, host.name)) for host in hosts]
        seconds = self._client.warm_seconds
        stays = f"; a process stays on each host {seconds:g} s for the next launch" if any(news) else ""
        what = f"{count} {'process' if count == 1 else 'processes'}"
        return f"Launching {job.name} on {what} by {self._client.program}: {places}{stays}."

    # -- the hosts

    def _find_hosts(self, options: Mapping[str, Any]) -> tuple[list[Host], list[str]]:
        """Return the hosts of a launch, and why there are none."""
        said, own = options.get("hosts"), self._hosts
        if said and own is not None:
            return [], [f"hosts= is said to {type(self).__name__} and to the launch: say it once"]
        if not (said or own):
            return [], [
                f"engine={self.name!r}: hosts= has to say on which, as in hosts=['gpu1', 'me@10.0.0.7:2']"
            ]
        if problem := self.find_problem():
            return [], [problem]
        hosts = parse_hosts(said or own or ())
        python = self._choose_python(options)
        unknown = sorted(set(python) - {host.name for host in hosts}) if isinstance(python, Mapping) else []
        if unknown:
            return [], [f"python= has {unknown[0]!r}, which is none of the hosts"]
        return hosts, []

    def _choose_python(self, options: Mapping[str, Any]) -> str | Mapping[str, str] | None:
        python = self._python if self._python is not None else options.get("python")
        if isinstance(python, Mapping):
            return {parse_hosts([host])[0].name: path for host, path in python.items()}
        return python

    def _borrow(
        self, hosts: Sequence[Host], options: Mapping[str, Any]
    ) -> contextlib.AbstractContextManager[list[Link]]:
        """Return a connection to each host for a block; LaunchError with a line for each problem."""
        return get_pool().borrow(self._client, self._choose_pythons(hosts, options), Wanted.here())

    def _choose_pythons(self, hosts: Sequence[Host], options: Mapping[str, Any]) -> dict[str, str | None]:
        """Return the Python of each host by its name; None finds one."""
        python = self._choose_python(options)
        return {host.name: python.get(host.name) if isinstance(python, Mapping) else python for host in hosts}


class _Hosts(Lender):
    """The hosts of a run, by the names of which the command finds them.

    Args:
        client: reaches them.
        pythons: the Python of each host, by its name.
        patience: how many seconds a restart waits for hosts that cannot be used.
    """

    def __init__(self, client: CommandClient, pythons: Mapping[str, str | None], patience: float) -> None:
        self._client, self._pythons, self._patience = client, pythons, patience

    def open(self, wait: Wait) -> list[Link]:
        """Return a connection to each host; LaunchError with a line for each problem."""
        return get_pool().open(self._client, self._pythons, Wanted.here(), lambda: wait(""))

    def find_obstacle(self, wait: Wait) -> str:
        """Return that a host cannot be used any more; one that cannot be reached is waited for."""
        deadline = time.monotonic() + self._patience
        while True:
            try:
                with interrupts.delay_interrupt():
                    for link in self.open(wait):
                        get_pool().put(link, is_clean=True)
                return ""
            except LaunchError as error:
                problem = "; ".join(str(error).splitlines())
                if isinstance(error, UnfitHostError):
                    return problem
            if time.monotonic() > deadline:
                return f"{problem}; rdzv_conf={{'join_timeout': seconds}} sets how long hosts are waited for"
            again = time.monotonic() + _PAUSE_SECONDS
            while time.monotonic() < again:
                wait(f"Waiting for hosts, {self._patience:g} s: {problem}")
                time.sleep(_LOOK_SECONDS)

    def give_back(self, *, is_stopped: bool) -> None:
        """Do nothing: the connections are in the pool."""


def count_ranks(hosts: Sequence[Host], links: Sequence[Link], use_cpu: bool) -> list[int]:
    """Return the number of ranks of each host: as it was said, else one for each device, or one."""
    return [
        host.count or (link.devices.count if link.devices is not None and not use_cpu else 0) or 1
        for host, link in zip(hosts, links, strict=True)
    ]


def _check_counts(job: Job, hosts: Sequence[Host], links: Sequence[Link]) -> list[str]:
    """Return what is wrong with the number of ranks, of the run and of each host."""
    use_cpu = uses_cpu(job.environment)
    counts = count_ranks(hosts, links, use_cpu)
    problems = []
    if sum(counts) != job.local_world_size:
        places = " + ".join(f"{count} on {host.name}" for host, count in zip(hosts, counts, strict=True))
        problems.append(
            f"num_processes={job.local_world_size}: hosts= makes {sum(counts)} ({places}): leave num_processes out, "
            "here and in the config"
        )
    return problems if use_cpu else [*problems, *check_devices(links, counts)]
