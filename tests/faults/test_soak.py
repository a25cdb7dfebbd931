"""The soak finds what it is there for; a few of its steps. `make soak` runs it for hours."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.scripts import ROOT
from tests.soak import leaks, processes
from tests.soak.actions import Piece
from tests.soak.disturb import Disturbance
from tests.soak.hosts import Host, Outcome, ProgramHost, SoakError
from tests.soak.steps import find_problem

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux's /proc")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """A program that the tests of this module share."""
    started = ProgramHost(tmp_path_factory.mktemp("soak") / "host")
    started.prepare()
    yield started
    started.close()


PLANTED = {
    "kept = os.open(__file__, os.O_RDONLY)": "descriptors",
    "kept = threading.Thread(target=time.sleep, args=(600,), daemon=True); kept.start()": "more threads",
    "kept = subprocess.Popen(['sh', '-c', 'sleep 600 & sleep 600'])": "still runs",
    "kept = subprocess.Popen(['true']); os.waitid(os.P_PID, kept.pid, os.WEXITED | os.WNOWAIT)": "nobody has waited",
    "open(os.path.join(os.environ['TMPDIR'], 'kept'), 'w').close()": "temp folder",
    "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])": "mask",
}


def test_what_a_host_keeps_is_found(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    for code, words in PLANTED.items():
        watch = leaks.Watch(host, seconds=0.0)
        watch.check()
        host.demand(code)
        with monkeypatch.context() as quick, pytest.raises(SoakError, match=words):
            quick.setattr(leaks, "SETTLE_SECONDS", 0.5)
            watch.check()
        host.demand("if isinstance(kept, subprocess.Popen): kept.kill(), kept.wait()")
        for pid, process in processes.find_marked(host.mark).items():
            if "sleep" in process.command:
                os.kill(pid, 9)


def test_memory_that_grows_is_found(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "STEPS_BEFORE", 2)
    monkeypatch.setattr(leaks, "LEAST_STEPS", 4)
    watch = leaks.Watch(host, seconds=0.0)
    host.demand("grown = []")
    with pytest.raises(SoakError, match="KiB a step"):
        for _ in range(20):
            host.demand("grown.append(bytearray(os.urandom(1 << 20)))")
            watch.check()


def test_records_that_come_ever_more_seldom_are_no_growth(host: Host) -> None:
    watch = leaks.Watch(host, seconds=0.0)
    records = (
        (0, 252),
        (16, 257),
        (21, 262),
        (33, 271),
        (42, 286),
        (92, 296),
        (105, 299),
        (120, 302),
        (139, 303),
    )
    watch._memory = [max(mib for step, mib in records if step <= now) << 20 for now in range(170)]
    watch._check_memory()
    late = ((0, 275), (160, 279), (195, 304))
    watch._memory = [max(mib for step, mib in late if step <= now) << 20 for now in range(226)]
    watch._check_memory()
    watch._memory = [size + 200 * 1024 * now for now, size in enumerate(watch._memory)]
    with pytest.raises(SoakError, match="KiB a step"):
        watch._check_memory()


def test_a_hang_is_told_with_stacks_and_what_outlives_its_host_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_STACK_SECONDS", 60.0)
    host = ProgramHost(tmp_path / "host")
    try:
        host.demand("import subprocess")
        with pytest.raises(SoakError, match=r"(?s)hangs.*subprocess.py"):
            host.run("subprocess.run(['sh', '-c', 'sleep 600 & sleep 600'])", seconds=8.0)
        host.kill()
        with pytest.raises(SoakError, match=r"processes live"):
            leaks.check_all_gone(host, 0.5)
    finally:
        host.close()
    leaks.check_all_gone(host, 60.0)


WRONG = [
    (Outcome(answer=1), Piece(code="", expected=2), ""),
    (Outcome(), Piece(code="", error=("ValueError", "")), ""),
    (Outcome(error=("TypeError", "")), Piece(code=""), "KeyboardInterrupt"),
    (Outcome(error=("ValueError", "of rank 1")), Piece(code="", error=("ValueError", "rank 0")), ""),
    (Outcome(answer=1, output="line"), Piece(code="", expected=1, shows=("line", 2)), ""),
    (Outcome(was_killed=True), Piece(code=""), ""),
]


@pytest.mark.parametrize(("outcome", "piece", "allowed"), WRONG)
def test_wrong_ends_are_found(outcome: Outcome, piece: Piece, allowed: str) -> None:
    assert find_problem(outcome, piece, Disturbance(title="", allowed=frozenset({allowed})))


def test_right_ends_are_none() -> None:
    interrupted = Disturbance(title="", allowed=frozenset({"KeyboardInterrupt"}))
    assert not find_problem(Outcome(answer=2), Piece(code="", expected=2), interrupted)
    assert not find_problem(Outcome(error=("KeyboardInterrupt", "")), Piece(code=""), interrupted)


def test_an_interrupt_that_python_could_not_raise_may_end_a_loader_process() -> None:
    error = ("RuntimeError", "DataLoader worker (pid(s) 7) exited unexpectedly")
    output = "Exception ignored in: <function _releaseLock>\nTraceback (most recent call last):\nKeyboardInterrupt: \n"
    interrupted = Disturbance(title="", allowed=frozenset({"KeyboardInterrupt"}))
    assert not find_problem(Outcome(error=error, output=output), Piece(code=""), interrupted)
    assert find_problem(Outcome(error=error), Piece(code=""), interrupted)
    assert find_problem(Outcome(error=error, output=output), Piece(code=""), Disturbance(title=""))


def test_an_interrupt_of_an_idle_kernel_may_stop_its_runs() -> None:
    stopped = Outcome(error=("RunStoppedError", "pause was stopped after 0.2 s"))
    interrupted = Disturbance(title="", allowed=frozenset({"KeyboardInterrupt"}))
    waiting = Piece(code="", expected=1, may_be_stopped=True)
    assert not find_problem(stopped, waiting, interrupted)
    assert find_problem(stopped, waiting, Disturbance(title=""))
    assert find_problem(stopped, Piece(code="", expected=1), interrupted)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_some_steps() -> None:
    command = [sys.executable, "-m", "tests.soak", "--seed", "1", "--steps", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert done.stdout.startswith("seed 1\n"), done.stdout
