"""What happens to a host while a piece of code runs: interrupts, kills and stopped processes, at random moments."""

from __future__ import annotations

import random
import signal
import textwrap
import threading
from collections.abc import Callable
from dataclasses import dataclass

from tests.soak import processes
from tests.soak.hosts import During, Host

_LOOK_SECONDS = 0.005


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """What happens while a piece runs.

    Attributes:
        title: in words.
        allowed: types of errors that it may cause.
        during: does it from outside; None where the host does it to itself.
        aim: arguments of `aim` in the host.
        kills_agent: whether the agent may end.
    """

    title: str
    allowed: frozenset[str] = frozenset()
    during: During | None = None
    aim: tuple[int, int, int] | None = None
    kills_agent: bool = False

    def wrap(self, code: str) -> str:
        """Return a piece of code with this disturbance in it."""
        code = textwrap.dedent(code)
        if self.aim is None:
            return code
        return f"aim{self.aim}\ntry:\n{textwrap.indent(code, '    ')}\nfinally:\n    end_aim()"


def _draw_moment(rng: random.Random) -> float:
    """Return seconds: as often some milliseconds as some tenths or seconds."""
    return float(10 ** rng.uniform(-3, 0.5))


def interrupt(rng: random.Random) -> Disturbance:
    """Interrupt from outside, once or several times."""
    moments = [_draw_moment(rng)]
    moments += [10 ** rng.uniform(-3.5, 0) for _ in range(rng.choice([0, 0, 1, 2]))]

    def during(host: Host, ended: threading.Event) -> None:
        for moment in moments:
            if ended.wait(moment):
                return
            host.interrupt()

    words = ", then ".join(f"{moment:.4f} s" for moment in moments)
    title = f"interrupt after {words}"
    return Disturbance(title=title, allowed=_INTERRUPTED, during=during)


def interrupt_at_line(rng: random.Random) -> Disturbance:
    """Interrupt at a line of the package, and perhaps again at one of the next calls."""
    line = _draw_line(rng)
    second = int(10 ** rng.uniform(0, 3)) if rng.random() < 0.5 else 0
    words = f", again {second} calls later" if second else ""
    return Disturbance(
        title=f"interrupt at line {line} of the package{words}",
        allowed=_INTERRUPTED,
        aim=(line, int(signal.SIGINT), second),
    )


def _draw_line(rng: random.Random) -> int:
    return rng.randint(1, rng.choice([300, 2000, 6000, 15000]))


def kill_worker(rng: random.Random) -> Disturbance:
    """Kill a worker, at any moment after its start."""
    moment, choice = _draw_moment(rng) / 2, rng.random()

    def during(host: Host, ended: threading.Event) -> None:
        found = _wait_for_workers(host, ended)
        if found and not ended.wait(moment):
            workers = processes.find_workers(host.pid, host.mark) or found
            processes.send(workers[int(choice * len(workers))].pid, signal.SIGKILL)

    title = f"a worker is killed {moment:.4f} s after the first one starts"
    return Disturbance(title=title, allowed=_WORKER_KILLED, during=during)


def kill_agent(rng: random.Random) -> Disturbance:
    """Kill the agent."""
    moment = _draw_moment(rng) / 3

    def during(host: Host, ended: threading.Event) -> None:
        if not ended.wait(moment):
            agent = processes.find_agent(host.pid, host.mark)
            if agent is not None:
                processes.send(agent.pid, signal.SIGKILL)

    errors = frozenset({"LaunchError", "WorkerError", "SessionError"})
    title = f"the agent is killed after {moment:.4f} s"
    return Disturbance(title=title, allowed=errors, during=during, kills_agent=True)


def pause_worker(rng: random.Random) -> Disturbance:
    """Stop a worker, and let it go on."""
    moment, seconds, choice = _draw_moment(rng) / 3, rng.uniform(0.1, 3), rng.random()

    def during(host: Host, ended: threading.Event) -> None:
        found = _wait_for_workers(host, ended)
        if not found or ended.wait(moment):
            return
        workers = processes.find_workers(host.pid, host.mark) or found
        pid = workers[int(choice * len(workers))].pid
        processes.send(pid, signal.SIGSTOP)
        ended.wait(seconds)
        processes.send(pid, signal.SIGCONT)

    return Disturbance(title=f"a worker is stopped for {seconds:.1f} s", during=during)


def pause_host(rng: random.Random) -> Disturbance:
    """Stop the host itself, and let it go on."""
    moment, seconds = _draw_moment(rng) / 2, rng.uniform(0.1, 3)

    def during(host: Host, ended: threading.Event) -> None:
        if not ended.wait(moment):
            processes.send(host.pid, signal.SIGSTOP)
            ended.wait(seconds)
            processes.send(host.pid, signal.SIGCONT)

    return Disturbance(title=f"it is stopped after {moment:.4f} s for {seconds:.1f} s", during=during)


def nothing(rng: random.Random) -> Disturbance:
    """Let a piece run in peace."""
    return Disturbance(title="")


def kill_host(rng: random.Random) -> Disturbance:
    """Kill the host from outside."""
    moment = _draw_moment(rng)

    def during(host: Host, ended: threading.Event) -> None:
        if not ended.wait(moment):
            host.kill()

    return Disturbance(title=f"it is killed after {moment:.4f} s", during=during)


def kill_host_at_line(rng: random.Random) -> Disturbance:
    """Kill the host at a line of the package, in whichever thread comes to it."""
    line = _draw_line(rng)
    return Disturbance(
        title=f"it is killed at line {line} of the package", aim=(line, int(signal.SIGKILL), 0)
    )


def _wait_for_workers(host: Host, ended: threading.Event) -> list[processes.Found]:
    while not (found := processes.find_workers(host.pid, host.mark)):
        if ended.wait(_LOOK_SECONDS):
            return []
    return found


_INTERRUPTED = frozenset({"KeyboardInterrupt"})
_WORKER_KILLED = frozenset({"WorkerKilledError", "SessionError", "LaunchError", "RuntimeError"})
"""LaunchError where it was killed before it began, RuntimeError where it was one of a loader."""
Draw = Callable[[random.Random], Disturbance]
DISTURBANCES: dict[Draw, int] = {
    nothing: 3,
    interrupt: 5,
    interrupt_at_line: 8,
    kill_worker: 3,
    kill_agent: 1,
    pause_worker: 1,
    pause_host: 1,
}
KILLS: dict[Draw, int] = {kill_host: 1, kill_host_at_line: 1}


def draw(rng: random.Random, kinds: dict[Draw, int]) -> Disturbance:
    """Return a disturbance, drawn by its weight."""
    return rng.choices(list(kinds), list(kinds.values()))[0](rng)
