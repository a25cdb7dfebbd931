"""What is said of ranks that wait for each other, and where an error was raised."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from notebook_accel import events
from notebook_accel.launch.supervise import hang_report
from notebook_accel.launch.worker.stacks import BACKWARD
from tests.unit.clock import wait_until

NOW = 1.0


def report(rank: int, collective: str, line: int = 3) -> events.StackReport:
    place = events.Frame(
        filename="/tmp/ipykernel_1/2.py", lineno=line, first_lineno=1, name="f", qualname="f"
    )
    return events.StackReport(rank=rank, time=NOW, collective=collective, frames=[place])


def test_ranks_that_wait_for_others_are_told_with_the_line_of_each() -> None:
    stacks = {0: report(0, "barrier"), 1: report(1, "", line=7)}
    text = hang_report.describe_hang(stacks, {0: 10, 1: 11}, {0, 1}, (), (), 12.0, {}, {})
    assert text.splitlines() == [
        "nothing was heard of ranks 0, 1 for 12 s: rank 0 has entered barrier, rank 1 has not",
        "rank 0 (process 10), in barrier:",
        "    a cell, line 3",
        "rank 1 (process 11):",
        "    a cell, line 7",
    ]


def test_ranks_that_are_done_or_take_no_part_are_told() -> None:
    text = hang_report.describe_hang({0: report(0, BACKWARD)}, {0: 10}, {0}, [1], [2], 12.0, {}, {})
    assert "rank 0 has entered backward, ranks 1, 2 have not" in text
    assert "rank 1 has returned" in text and "rank 2 takes no part in the call" in text


def test_a_rank_that_does_not_answer_is_told() -> None:
    stacks = {0: report(0, "barrier")}
    row = hang_report.describe_hang(stacks, {0: 10, 1: 11}, {0, 1}, (), (), 12.0, {}, {}).splitlines()[-1]
    assert row == "rank 1 (process 11) does not answer, so C code holds the interpreter; its stack follows"


def test_ranks_in_different_collectives_are_told() -> None:
    stacks = {0: report(0, "barrier"), 1: report(1, "recv")}
    text = hang_report.describe_hang(stacks, {0: 10, 1: 11}, {0, 1}, (), (), 12.0, {}, {})
    assert text.startswith("nothing was heard of ranks 0, 1 for 12 s: they are in different collectives\n")


def test_a_rank_that_has_returned_and_does_not_end_is_told_as_that() -> None:
    left = "rank 0 (process 10) has returned, and its process has not ended"
    told = hang_report.describe_hang({0: report(0, "")}, {0: 10}, {0}, {0, 1}, (), 8.0, {}, {})
    _, second, _, third = told.split("\n")
    assert second == f"{left}:" and third == "rank 1 has returned"
    silent = hang_report.describe_hang({}, {0: 10}, {0}, {0}, (), 8.0, {}, {})
    assert silent.split("\n")[1].startswith(f"{left}: does not answer")
    waiting = hang_report.describe_hang({0: report(0, "all_reduce")}, {0: 10}, {0}, {0}, (), 8.0, {}, {})
    assert f"{left}, in all_reduce:" in waiting and "has not\n" not in waiting


def test_a_rank_that_has_returned_and_answers_is_named_once() -> None:
    stacks = {0: report(0, "barrier"), 1: report(1, "")}
    told = hang_report.describe_hang(stacks, {0: 10, 1: 11}, {0, 1}, {1}, (), 8.0, {}, {})
    assert "rank 0 has entered barrier, rank 1 has not" in told and "rank 1 (process 11)" in told
    told = hang_report.describe_hang(stacks, {0: 10, 1: 11}, {0, 1}, {1}, (), 8.0, {}, {0: "n1", 1: "n2"})
    assert "rank 0 (on n1, process 10), in barrier:" in told and "rank 1 (on n2, process 11)" in told


def test_the_frame_of_a_cell_counts_more_than_those_of_files() -> None:
    def frame(filename: str) -> events.Frame:
        return events.Frame(filename=filename, lineno=3, first_lineno=1, name="f", qualname="f")

    cell, own, library = frame("/tmp/ipykernel_1/2.py"), frame("/home/me/train.py"), frame(threading.__file__)
    assert hang_report.find_users_frame([cell, own, library]) == cell
    assert hang_report.find_users_frame([own, library]) == own
    assert hang_report.find_users_frame([library]) is None


# -- processes that cannot go on


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def wait_for_state(pid: int) -> str:
    wait_until(lambda: hang_report.find_process_state(pid))
    return hang_report.find_process_state(pid)


def test_a_stopped_process_is_told(sleeper: subprocess.Popen[bytes]) -> None:
    assert hang_report.find_process_state(os.getpid()) == ""
    sleeper.send_signal(signal.SIGSTOP)
    assert wait_for_state(sleeper.pid).endswith(f"`kill -CONT {sleeper.pid}` lets it go on")
    sleeper.kill()
    sleeper.wait()
    assert hang_report.find_process_state(sleeper.pid) == ""


@pytest.mark.parametrize("state", ["disk-sleep", "tracing-stop"])
def test_other_states_that_nothing_ends_are_told(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_report, "find_state", lambda pid: state)
    assert hang_report.find_process_state(os.getpid()) != ""


def test_a_rank_that_cannot_go_on_is_told_by_its_state() -> None:
    text = hang_report.describe_hang(
        {0: report(0, "barrier")},
        {0: 10, 1: 11, 2: 12},
        {0, 1},
        (),
        (),
        9.0,
        {1: "is stopped", 2: "waits"},
        {},
    )
    assert "rank 1 (process 11) is stopped\nrank 2 (process 12) waits" in text
