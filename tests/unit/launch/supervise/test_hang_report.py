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


def report(rank: int, collective: str, seconds: float, line: int = 3) -> events.StackReport:
    place = events.Frame(
        filename="/tmp/ipykernel_1/2.py", lineno=line, first_lineno=1, name="f", qualname="f"
    )
    return events.StackReport(
        rank=rank, time=NOW, call=1, collective=collective, seconds=seconds, frames=[place]
    )


def test_a_wait_is_told_with_the_line_of_each_rank() -> None:
    text = hang_report.describe_wait(
        {0: report(0, "barrier", 12.0), 1: report(1, "", 30.0, line=7)}, (), (), 10.0
    )
    first, *rows, _ = text.splitlines()
    assert first == "rank 0 has waited for 12 s in barrier, which rank 1 has not entered:"
    assert rows == ["  rank 0: in barrier, a cell, line 3", "  rank 1: a cell, line 7"]


def test_ranks_that_are_done_or_take_no_part_are_told() -> None:
    text = hang_report.describe_wait({0: report(0, BACKWARD, 12.0)}, [1], [2], 10.0)
    assert "which ranks 1, 2 have not entered" in text
    assert "rank 1: has ended the call" in text and "rank 2: takes no part in the call" in text


def test_a_rank_that_does_not_answer_is_told() -> None:
    text = hang_report.describe_wait({0: report(0, "barrier", 12.0)}, (), (), 10.0, {1: os.getpid()})
    first, _, row, _ = text.splitlines()
    assert first == "rank 0 has waited for 12 s in barrier, which rank 1 has not entered:"
    assert row == "  rank 1 does not answer, so C code holds the interpreter"


def test_ranks_in_different_collectives_are_told() -> None:
    text = hang_report.describe_wait(
        {0: report(0, "barrier", 12.0), 1: report(1, "recv", 11.0)}, (), (), 10.0
    )
    assert text.startswith("ranks 0, 1 have waited for 12 s in different collectives:")


def test_a_rank_that_has_returned_and_does_not_end_is_told_as_that() -> None:
    left = "rank 0 (process 10) has returned, and its process has not ended"
    told = hang_report.describe_hang({0: report(0, "", 9.0)}, {0: 10}, {0}, {0, 1}, 8.0, {})
    _, second, _, third = told.split("\n")
    assert second == f"{left}:" and third == "rank 1 has returned"
    silent = hang_report.describe_hang({}, {0: 10}, {0}, {0}, 8.0, {})
    assert silent.split("\n")[1].startswith(f"{left}: does not answer")
    waiting = hang_report.describe_hang({0: report(0, "all_reduce", 9.0)}, {0: 10}, {0}, {0}, 8.0, {})
    assert f"{left}, in all_reduce:" in waiting and "has not\n" not in waiting


def test_a_rank_that_has_returned_and_answers_is_named_once() -> None:
    stacks = {0: report(0, "barrier", 12.0), 1: report(1, "", 0.0)}
    told = hang_report.describe_wait(stacks, [1], (), 10.0)
    assert "which rank 1 has not entered" in told
    told = hang_report.describe_hang(stacks, {0: 10, 1: 11}, {0, 1}, {1}, 8.0, {})
    assert "rank 0 has entered barrier, rank 1 has not" in told and "rank 1 (process 11)" in told
    told = hang_report.describe_hang(stacks, {0: 10, 1: 11}, {0, 1}, {1}, 8.0, {}, {0: "n1", 1: "n2"})
    assert "rank 0 (on n1, process 10), in barrier:" in told and "rank 1 (on n2, process 11)" in told


@pytest.mark.parametrize(
    "stacks",
    [
        {0: report(0, "barrier", 9.0), 1: report(1, "", 30.0)},  # not long enough
        {0: report(0, "barrier", 90.0), 1: report(1, "barrier", 30.0)},  # all are there
        {0: report(0, "", 90.0), 1: report(1, "", 90.0)},  # they compute
    ],
)
def test_what_is_no_wait_for_absent_ranks_is_not_told(stacks: dict[int, events.StackReport]) -> None:
    assert hang_report.describe_wait(stacks, (), (), 10.0) == ""


def test_where_an_error_was_raised_is_looked_for_in_its_context() -> None:
    def error(filename: str, context: events.RaisedError | None = None) -> events.RaisedError:
        place = events.Frame(filename=filename, lineno=3, first_lineno=1, name="f", qualname="f")
        return events.RaisedError(type_name="E", message="", pickled=None, frames=[place], context=context)

    raised = error(threading.__file__, error("/tmp/ipykernel_1/2.py"))
    found = hang_report.find_frame_of_error(raised)
    assert found is not None and found.filename == "/tmp/ipykernel_1/2.py"
    assert hang_report.find_frame_of_error(error(threading.__file__)) is None


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


@pytest.mark.skipif(sys.platform == "win32", reason="processes cannot be stopped by a signal there")
def test_a_stopped_and_an_ended_process_are_told(sleeper: subprocess.Popen[bytes]) -> None:
    assert hang_report.find_process_state(os.getpid()) == ""
    sleeper.send_signal(signal.SIGSTOP)
    assert wait_for_state(sleeper.pid).endswith(f"`kill -CONT {sleeper.pid}` lets it go on")
    sleeper.kill()
    wait_until(lambda: "has ended" in hang_report.find_process_state(sleeper.pid))
    sleeper.wait()
    assert hang_report.find_process_state(sleeper.pid) == ""


@pytest.mark.parametrize("state", ["disk-sleep", "tracing-stop"])
def test_other_states_that_nothing_ends_are_told(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.Process.status", lambda process: state)
    assert hang_report.find_process_state(os.getpid()) != ""


def test_a_rank_that_cannot_go_on_is_told_by_its_state() -> None:
    text = hang_report.describe_hang(
        {0: report(0, "barrier", 9.0)}, {0: 10, 1: 11, 2: 12}, {0, 1}, (), 9.0, {1: "is stopped", 2: "waits"}
    )
    assert "rank 1 (process 11) is stopped\nrank 2 (process 12) waits" in text
