"""Processes that have ended, and such that multiprocessing only takes to have ended, or not yet."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from notebook_accel.launch.supervise import end_watch
from notebook_accel.launch.supervise.end_watch import EndWatch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has descriptors of processes")


class Claimed:
    """A process with an exit code of our choice.

    Args:
        pid: its id.
        exitcode: that somebody gives for it.
        sentinel: a descriptor that becomes readable when the code has come.
    """

    def __init__(self, pid: int, exitcode: int | None, sentinel: int = -1) -> None:
        self.pid = pid
        self.exitcode = exitcode
        self.sentinel = sentinel


@contextmanager
def sleeper() -> Iterator[multiprocessing.process.BaseProcess]:
    process = multiprocessing.get_context("fork").Process(target=signal.pause)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()
        process.close()


def find_unused_pid() -> int:
    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()
    process.join()
    pid = process.pid or 0
    process.close()
    return pid


def test_a_process_runs_as_long_as_the_system_says_so() -> None:
    """The fork server passes exit codes on; where it was killed, multiprocessing takes its children to have ended."""
    with sleeper() as process:
        watch = EndWatch(Claimed(process.pid or 0, 255), server=find_unused_pid())
        assert not watch.has_ended()
        process.kill()
        process.join()
        assert watch.has_ended() and watch.exitcode is None, "multiprocessing makes the code up"
        watch.close()


def test_a_python_that_was_built_on_an_old_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    with sleeper() as process:
        watch = EndWatch(process)
        assert not watch.has_ended() and watch.fd == process.sentinel
        process.kill()
        process.join()
        assert watch.has_ended() and watch.exitcode == -signal.SIGKILL
        watch.close()


def test_a_process_may_leave_with_that_code_itself() -> None:
    with sleeper() as process:
        watch = EndWatch(Claimed(process.pid or 0, 255), server=os.getpid())
        process.kill()
        process.join()
        assert watch.has_ended() and watch.exitcode == 255
        watch.close()


def test_a_code_that_comes_later_is_waited_for_without_looking_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(end_watch, "_CODE_SECONDS", math.inf)
    with sleeper() as process:
        code, passed_on = os.pipe()
        claimed = Claimed(process.pid or 0, None, code)
        watch = EndWatch(claimed)
        assert not watch.has_ended() and watch.fd not in (code, -1)
        process.kill()
        process.join()
        assert not watch.has_ended() and watch.fd == code
        assert not watch.has_ended() and watch.fd == code
        os.close(passed_on)
        assert not watch.has_ended() and watch.fd == -1, "there is no more to wait for"
        claimed.exitcode = -9
        assert watch.has_ended() and watch.exitcode == -9
        watch.close()
        os.close(code)


def test_the_exit_code_of_a_process_that_has_ended() -> None:
    process = multiprocessing.get_context("fork").Process(target=os._exit, args=(3,))
    process.start()
    watch = EndWatch(process)
    process.join()
    try:
        assert watch.has_ended() and watch.exitcode == 3
    finally:
        watch.close()
        process.close()
