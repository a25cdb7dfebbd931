"""Processes that have ended, and one that multiprocessing only takes to have ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys

import pytest

from notebook_accel.launch.supervise.end_watch import EndWatch


class Claimed:
    """A process with an exit code of our choice.

    Args:
        pid: its id.
        exitcode: that somebody gives for it.
    """

    sentinel = -1

    def __init__(self, pid: int, exitcode: int | None) -> None:
        self.pid = pid
        self.exitcode = exitcode


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has descriptors of processes")
def test_a_process_runs_as_long_as_the_system_says_so() -> None:
    """The fork server passes exit codes on; where it was killed, multiprocessing takes its children to have ended."""
    process = multiprocessing.get_context("fork").Process(target=signal.pause)
    process.start()
    watch = EndWatch(Claimed(process.pid or 0, 255))
    try:
        assert not watch.has_ended()
        process.kill()
        process.join()
        assert watch.has_ended() and watch.exitcode == 255
    finally:
        watch.close()
        process.kill()
        process.join()
        process.close()


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
