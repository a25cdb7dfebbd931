"""The steps of a soak: what is drawn from the seed is done, and everything is looked at afterwards."""

from __future__ import annotations

import contextlib
import random
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.soak import actions, disturb, leaks
from tests.soak.actions import Action, Piece
from tests.soak.disturb import Disturbance
from tests.soak.hosts import END_SECONDS, KINDS, Host, Outcome, SoakError

__all__ = ["Soak", "SoakError"]

_WARM_UP = """
for method in ("fork", "fresh"):
    assert notebook_launcher(give, ("number", 1), num_processes=2, start_method=method, returns="all") == [10, 11]
run = notebook_launcher(shout, ("flood", 10), num_processes=2, block=False)
run.result()
for method in ("fork", "fresh"):
    with Session(2, start_method=method) as session:
        session.run(add_up, 10)
session = None
print("x" * 1_000_000, flush=True)  # pyzmq starts a thread for the first large message
notebook_launcher(train, (CHECKPOINT, 8, 1, 2), num_processes=1)
answer(digest(notebook_launcher(give, ("tensor", 100_000), num_processes=2, returns="all")))
"""


_KERNEL_ENDED = "ipykernel ended by the interrupt"


class Lane:
    """A host, and the thread that does everything with it.

    Args:
        kind: of the host.
        folder: for it.
    """

    def __init__(self, kind: str, folder: Path) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=kind)
        self._kind = kind
        self._host: Host | None = None
        self._watch: leaks.Watch | None = None

    def submit(self, rng: random.Random) -> Callable[[], list[str]]:
        """Begin with an action; return what waits for its end and returns what was done, in words."""
        return self._pool.submit(self._act, rng).result

    def _start(self) -> Host:
        host = self._host = KINDS[self._kind](self._folder)
        host.prepare()
        host.demand(f"CHECKPOINT = {str(self._folder / 'checkpoint')!r}\n{_WARM_UP}\nrun = None")
        self._watch = leaks.Watch(host)
        return host

    def _act(self, rng: random.Random) -> list[str]:
        host = self._host or self._start()
        action = actions.draw(rng, self._folder)
        at = rng.randrange(len(action.pieces))
        disturbance = disturb.draw(rng, disturb.DISTURBANCES)
        words = [f"{host.kind}: {action.title}"]
        if disturbance.title:
            words.append(
                f"{disturbance.title} in piece {at}" if len(action.pieces) > 1 else disturbance.title
            )
        try:
            words.append(self._run_pieces(host, action, disturbance, at, words))
            if words[-1] == _KERNEL_ENDED:
                self._forget(host)
            else:
                self._look_after(host, action, disturbance, rng)
        except SoakError as error:
            raise SoakError(f"{'; '.join(words)}\n{error}") from None
        return words

    def _run_pieces(
        self, host: Host, action: Action, disturbance: Disturbance, at: int, words: list[str]
    ) -> str:
        ended = "as expected"
        for number, piece in enumerate(action.pieces):
            now = disturbance if number == at else Disturbance(title="")
            if number > at:  # what came at the end of a piece is met by the next
                now = Disturbance(title="", allowed=disturbance.allowed)
            outcome = host.run(now.wrap(piece.code), now.during)
            if number == at and outcome.aims:
                words.append(" and ".join(line.rpartition("/")[2] for line in outcome.aims.splitlines()))
            if _has_ended_by_ipykernel(host, outcome, now):
                return _KERNEL_ENDED
            if problem := find_problem(outcome, piece, now):
                raise SoakError(f"{problem}\npiece {number}:\n{piece.code}\n{outcome}")
            is_disturbed = outcome.error is not None and outcome.error[0] in now.allowed
            if outcome.error is not None and is_disturbed:
                return outcome.error[0]
            if outcome.error is not None:
                ended = outcome.error[0]
        return ended

    def _look_after(self, host: Host, action: Action, disturbance: Disturbance, rng: random.Random) -> None:
        if action.has_session:
            host.demand("check_session()")
        host.demand("end_all()\nsession = None\nrun = other = None\ngc.collect()")
        # an agent that was killed is waited for when the next one is needed
        method = "fresh" if disturbance.kills_agent else rng.choice(actions.METHODS)
        launch = (
            f"notebook_launcher(give, ('number', 5), num_processes=2, start_method={method!r}, returns='all')"
        )
        if (values := host.demand(f"answer({launch})")) != [50, 51]:
            raise SoakError(f"the next launch gave {values}, not [50, 51]")
        assert self._watch is not None
        self._watch.check()

    def _forget(self, host: Host) -> None:
        """See that nothing is left of a host that has ended; the next step has a new one."""
        self._host = self._watch = None
        try:
            leaks.check_all_gone(host, END_SECONDS)
        finally:
            host.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def describe(self) -> str:
        """Return how much memory the host has come to."""
        return f"the {self._kind}: no step" if self._watch is None else str(self._watch)

    def close(self) -> None:
        """End the host."""
        if self._host is not None:
            self._pool.submit(self._host.close).result()
        self._pool.shutdown()


class Soak:
    """Makes steps, each drawn from the seed and its own number.

    Args:
        seed: of all steps.
        folder: for the hosts.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self._seed = seed
        self._folder = folder
        self._lanes = [Lane(kind, folder / kind) for kind in sorted(KINDS)]
        self._victims = ThreadPoolExecutor(1, thread_name_prefix="victim")
        self._began = time.monotonic()

    def make_step(self, number: int) -> None:
        """Make a step, and print what was done and how it ended.

        Raises:
            SoakError: something leaks, hangs or is wrong.
        """
        rng, began = random.Random(f"{self._seed}/{number}"), time.monotonic()
        shared = leaks.list_shared_memory()
        kind = rng.choices(["one", "both", "victim"], [6, 2, 1])[0]
        if kind == "victim":
            words = self._victims.submit(self._end_host, rng).result()
            self._print(number, began, words)
            leaks.check_shared_memory(shared, END_SECONDS)
            return
        lanes = self._lanes if kind == "both" else [rng.choice(self._lanes)]
        waits = [lane.submit(random.Random(rng.random())) for lane in lanes]
        errors = []
        for wait in waits:
            try:
                self._print(number, began, wait())
            except SoakError as error:
                errors.append(str(error))
        if errors:
            raise SoakError("\n".join(errors))
        leaks.check_shared_memory(shared)

    def _end_host(self, rng: random.Random) -> list[str]:
        """Start a host for this step, end it in the middle of something, and see what is left of it."""
        folder = self._folder / "victim"
        host = KINDS[rng.choice(sorted(KINDS))](folder)
        action = actions.draw(rng, folder)
        at = rng.randrange(len(action.pieces))
        how = rng.choices(["killed", "killed idle", "finished"], [4, 1, 1])[0]
        kill = disturb.draw(rng, disturb.KILLS) if how == "killed" else Disturbance(title=f"it is {how}")
        words = [f"{host.kind}, new: {action.title}", f"{kill.title} in piece {at}"]
        try:
            host.prepare()
            if rng.random() < 0.5:
                host.demand("notebook_launcher(give, ('number', 1), num_processes=2, start_method='fresh')")
            for number, piece in enumerate(action.pieces[: at + 1]):
                now = kill if number == at else Disturbance(title="")
                outcome = host.run(now.wrap(piece.code), now.during)
                if outcome.aims:
                    words.append(outcome.aims.strip().rpartition("/")[2])
            host.finish() if how == "finished" else host.kill()
            words.append("nothing of it is left")
            leaks.check_all_gone(host, END_SECONDS)
        except SoakError as error:
            raise SoakError(f"{'; '.join(words)}\n{error}") from None
        finally:
            host.close()
            shutil.rmtree(folder, ignore_errors=True)
        return words

    def _print(self, number: int, began: float, words: list[str]) -> None:
        what, ended = "; ".join(words[:-1]), words[-1]
        seconds = time.monotonic() - began
        print(f"{time.strftime('%H:%M:%S')}  {number}  {what} -> {ended}  {seconds:.1f} s", flush=True)

    def describe(self) -> str:
        """Return how long it took, and how much memory the hosts have come to."""
        minutes = (time.monotonic() - self._began) / 60
        return "\n".join([f"{minutes:.1f} minutes", *(lane.describe() for lane in self._lanes)])

    def close(self) -> None:
        """End all hosts."""
        for lane in self._lanes:
            with contextlib.suppress(Exception):
                lane.close()
        self._victims.shutdown()


def _has_ended_by_ipykernel(host: Host, outcome: Outcome, disturbance: Disturbance) -> bool:
    """Return whether a kernel has ended because an interrupt from outside met ipykernel's own code.

    One that comes just before or after the cell's code, in the lines of `Kernel.dispatch_shell` that set and reset the
    signal handler, ends the loop of `IPKernelApp.start`. Kernels without this package end too.
    """
    return (
        host.kind == "notebook"
        and outcome.was_killed
        and outcome.exitcode == 0
        and disturbance.during is not None
        and "KeyboardInterrupt" in disturbance.allowed
    )


def _lost_an_interrupt(outcome: Outcome) -> bool:
    """Return whether Python could not raise an interrupt where it arrived, and only a loader process ended by it.

    A kernel's interrupt is for its whole process group. In the callbacks of os.register_at_fork, which logging has,
    Python prints an exception and goes on.
    """
    assert outcome.error is not None
    _, _, ignored = outcome.output.partition("Exception ignored in")
    return "KeyboardInterrupt" in ignored and outcome.error[1].startswith("DataLoader worker (pid(s)")


def find_problem(outcome: Outcome, piece: Piece, disturbance: Disturbance) -> str:
    """Return what is wrong about how a piece ended; empty where nothing is."""
    if outcome.was_killed:
        return "the process that launches has ended"
    if outcome.error is not None:
        name, text = outcome.error
        if name in disturbance.allowed:
            return ""
        if name == "RunStoppedError" and piece.may_be_stopped and "KeyboardInterrupt" in disturbance.allowed:
            return ""
        if piece.error is not None and name == piece.error[0] and "WorkerKilledError" in disturbance.allowed:
            return ""  # stopped, say, and a rank with it
        if "KeyboardInterrupt" in disturbance.allowed and _lost_an_interrupt(outcome):
            return ""
        if piece.error is None:
            return f"it raised {name}"
        if name != piece.error[0] or piece.error[1] not in text:
            return f"it raised {name}, not {piece.error[0]}: {piece.error[1]}"
        return ""
    if piece.error is not None:
        return f"it did not raise {piece.error[0]}"
    if outcome.answer != piece.expected and outcome.answer not in piece.choices:
        return f"it gave {str(outcome.answer)[:500]}, not {str(piece.expected)[:500]}"
    if piece.shows is not None and (count := outcome.output.count(piece.shows[0])) != piece.shows[1]:
        return f"it showed {piece.shows[0]!r} {count} times, not {piece.shows[1]}"
    return ""
