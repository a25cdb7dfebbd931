"""What a host may not keep after a step: processes, descriptors, threads, shared memory, files, and memory."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import guards
from tests.soak import processes
from tests.soak.hosts import Host, SoakError

SHARED_MEMORY = Path("/dev/shm")
SETTLE_SECONDS = 45.0
"""Generous: ipykernel closes the sockets of threads that wrote every 10 s only."""
STEPS_BEFORE = 20
"""Steps after which memory may count: caches fill until then."""
LEAST_STEPS = 150
"""Steps after those until it is judged: the last 8 runs are kept, and the output of a flood takes megabytes."""
MOST_GROWTH = 128 * 1024
"""Bytes a step of a host's own memory, as the median of slopes between steps, see `Watch.growth`. Each step compiles
cells and keeps their sources, which is some kilobytes; a launch that keeps what it has sent or received keeps more."""
_PARTS = 5
"""Of the later half of all steps."""
_MOST_SERVANTS = 3  # the agent, a template, the resource tracker
_FOR_TEMPLATES = 8  # descriptors of an agent, which keeps some for each template
_OPENED_ONCE = ("/dev/null", "/dev/urandom", "/dev/random", "/proc/", "/sys/")
_OF_KILLED_WORKERS = "listener-"  # their sockets go with the notebook
_FOLDERS_OF_OTHERS = ("torchinductor_", "matplotlib-")


@dataclass(frozen=True, kw_only=True)
class State:
    """What a host has at a moment.

    Attributes:
        descriptors: by kind.
        agent: process id of its agent; None where it has none.
        agent_descriptors: by kind.
        threads: of its process.
        others: its processes other than itself, its agent with the templates, and the resource tracker; described.
        servants: how many of the latter it has.
        zombies: children that nobody has waited for.
        files: number of entries in its temp folder and below.
    """

    descriptors: Counter[str]
    agent: int | None
    agent_descriptors: Counter[str]
    threads: int
    others: dict[int, str]
    servants: int
    zombies: list[int]
    files: int

    @classmethod
    def read(cls, host: Host) -> State:
        """Return the state of a host now."""
        marked = processes.find_marked(host.mark)
        servants = [p.pid for p in marked.values() if p.is_servant]
        known = {host.pid, *servants}
        agent = processes.find_agent(host.pid, host.mark)
        agent_pid = None if agent is None else agent.pid
        return cls(
            descriptors=_count(host.pid),
            agent=agent_pid,
            agent_descriptors=_count(agent_pid),
            threads=processes.count_threads(host.pid),
            others={pid: str(p) for pid, p in marked.items() if pid not in known},
            servants=len(servants),
            zombies=processes.list_zombies(host.pid),
            files=sum(len(names) for names in _list_files(host.temp)),
        )

    def find_leaks(self, before: State) -> list[str]:
        """Return a sentence for each thing that an earlier state did not have."""
        found = [f"still runs: {text}" for text in self.others.values()]
        found += [f"process {pid} has ended and nobody has waited for it" for pid in self.zombies]
        if self.servants > max(before.servants, _MOST_SERVANTS):
            found.append(f"{self.servants} agents, templates and resource trackers")
        more = self.descriptors - before.descriptors
        found += [f"{count} more of its descriptors: {kind}" for kind, count in more.items()]
        if self.agent == before.agent:
            more = self.agent_descriptors - before.agent_descriptors
            found += [
                f"{count} more of the agent's descriptors: {kind}"
                for kind, count in more.items()
                if count > _FOR_TEMPLATES
            ]
        if self.threads > before.threads:
            found.append(f"{self.threads - before.threads} more threads")
        if self.files > before.files:
            found.append(f"{self.files - before.files} more entries in its temp folder")
        return found


class Watch:
    """Compares a host with what it was after its warm-up.

    Args:
        host: just warmed up.
        seconds: to wait first, for what goes by itself.
    """

    def __init__(self, host: Host, seconds: float = 15.0) -> None:
        self.host = host
        self._memory: list[int] = []
        self._baseline = _read_least(host, seconds)
        self._inside = self._look()

    def _look(self) -> dict[str, Any]:
        found: dict[str, Any] = self.host.demand("look()")
        return found

    def check(self) -> None:
        """Wait until the host has nothing more than before.

        Raises:
            SoakError: it keeps something, or does not answer.
        """
        inside = self._look()
        deadline = time.monotonic() + SETTLE_SECONDS
        while leaks := [*State.read(self.host).find_leaks(self._baseline), *self._compare(inside)]:
            if time.monotonic() > deadline:
                self._fail(leaks)
            time.sleep(0.2)
            if time.monotonic() > deadline - SETTLE_SECONDS / 2:
                inside = self._look()
        self._memory.append(processes.read_own_memory(self.host.pid))
        self._check_memory()

    def _compare(self, inside: dict[str, Any]) -> list[str]:
        found = [f"a run is {status}" for status in inside["runs"] if status in ("starting", "running")]
        found += [
            f"{name}: {self._inside[name]} became {inside[name]}"
            for name in ("handler", "mask")
            if inside[name] != self._inside[name]
        ]
        more = Counter(inside["threads"]) - Counter(self._inside["threads"])
        return found + [f"thread {name!r} runs" for name in more if "notebook_accel" in name]

    def _fail(self, leaks: list[str]) -> None:
        marked = list(processes.find_marked(self.host.mark))
        stacks = processes.describe(marked, self.host.stacks)
        text = "\n".join(leaks)
        raise SoakError(f"the {self.host.kind} keeps something after {SETTLE_SECONDS:g} s:\n{text}\n{stacks}")

    @property
    def growth(self) -> float:
        """Bytes of memory that the host grows by in a step, in the later half of its steps.

        The first half holds records: the most that the last runs ever held at once, the longest output, the largest
        result. Records come ever more seldom, and a late one shows in one part of the later half only; a launch that
        keeps something keeps it as often as before, which shows between most pairs of steps and in most parts. The host
        has given back what it freed.
        """
        counted = self._memory[max(STEPS_BEFORE, len(self._memory) // 2) :]
        if len(counted) <= _PARTS:
            return 0.0
        places = range(0, len(counted), max(1, len(counted) // 60))
        edges = [number * (len(counted) - 1) // _PARTS for number in range(_PARTS + 1)]
        return min(
            statistics.median(
                (counted[later] - counted[sooner]) / (later - sooner) for sooner, later in found
            )
            for found in (list(itertools.combinations(places, 2)), list(itertools.pairwise(edges)))
        )

    def _check_memory(self) -> None:
        if len(self._memory) >= STEPS_BEFORE + LEAST_STEPS and self.growth > MOST_GROWTH:
            raise SoakError(
                f"the {self.host.kind} grows by {self.growth / 1024:.0f} KiB a step, "
                f"over {len(self._memory)} steps: {[size >> 20 for size in self._memory]} MiB"
            )

    def __str__(self) -> str:
        last = f"{self._memory[-1] >> 20} MiB" if self._memory else "not measured"
        return f"the {self.host.kind}: {len(self._memory)} steps, {last}, {self.growth / 1024:.1f} KiB more a step"


def list_shared_memory() -> set[str]:
    """Return the names of all shared memory and semaphores."""
    return {name for name in os.listdir(SHARED_MEMORY) if not guards.SharedMemory.is_being_made(name)}


def check_shared_memory(before: set[str], seconds: float = SETTLE_SECONDS) -> None:
    """Raise SoakError where shared memory or semaphores stay that were not there before."""
    if not processes.wait_until(lambda: not list_shared_memory() - before, seconds):
        raise SoakError(f"shared memory is left: {sorted(list_shared_memory() - before)}")


def check_all_gone(host: Host, seconds: float) -> None:
    """Raise SoakError where a process of a host that has ended lives on."""
    if not processes.wait_until(lambda: not processes.find_marked(host.mark), seconds):
        left = processes.find_marked(host.mark)
        stacks = processes.describe(left, host.stacks)
        raise SoakError(
            f"{len(left)} processes live {seconds:g} s after the end of their {host.kind}:\n{stacks}"
        )


def _read_least(host: Host, seconds: float) -> State:
    """Return the state after what goes by itself within some seconds has gone."""
    states = []
    for _ in range(3):
        time.sleep(seconds / 3)
        host.demand("look()")
        states.append(State.read(host))
    return min(states, key=lambda state: sum(state.descriptors.values()))


def _count(pid: int | None) -> Counter[str]:
    kinds = Counter[str]() if pid is None else processes.count_descriptors(pid)
    return Counter({kind: count for kind, count in kinds.items() if not kind.startswith(_OPENED_ONCE)})


def _list_files(folder: Path) -> list[list[str]]:
    found = []
    for _, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(_FOLDERS_OF_OTHERS)]
        found.append([*folders, *(name for name in files if not name.startswith(_OF_KILLED_WORKERS))])
    return found
