"""Where a thread is, and in which collective."""

from __future__ import annotations

import subprocess
import sys
import threading
import types
from typing import Any

import pytest

import notebook_accel.comm.base  # noqa: F401 - which a process that is in a collective has imported
from notebook_accel.launch.worker.stacks import BACKWARD, StackWatch, find_collective
from tests.unit.clock import Clock, wait_in


def test_a_thread_that_stands_still_is_seen_to(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("notebook_accel.launch.worker.stacks.time", clock)
    go = threading.Event()

    def stand() -> None:
        go.wait(60)

    thread = threading.Thread(target=stand)
    thread.start()
    assert thread.ident is not None
    looker = StackWatch(thread.ident)
    wait_in(thread, "wait")
    while looker.look().seconds == 0:  # it may still be on its way to the lock
        clock.now += 1
    clock.now += 10
    seen = looker.look()
    go.set()
    thread.join()
    assert seen.seconds > 10
    assert "stand" in [frame.name for frame in seen.frames] and seen.collective == ""


def test_at_its_end_a_process_is_where_the_thread_is_that_it_waits_for() -> None:
    """Its main thread waits in `threading._shutdown`, which is no code of the user's."""
    program = """
import threading
from notebook_accel.launch.worker.stacks import StackWatch
go = threading.Event()
def linger():
    go.wait(60)
def look():
    watch = StackWatch(threading.main_thread().ident)
    while "linger" not in (names := [frame.name for frame in watch.look().frames]):
        pass
    print(names, flush=True)
    go.set()
threading.Thread(target=linger).start()
threading.Thread(target=look, daemon=True).start()
threading._shutdown()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert "'linger', 'wait'" in done.stdout, done.stderr


def test_collectives_are_known_by_their_outermost_function() -> None:
    def stack(*places: tuple[str, str]) -> list[Any]:
        codes = [types.SimpleNamespace(co_filename=file, co_name=name) for file, name in places]
        return [types.SimpleNamespace(f_code=code) for code in codes]

    torch_file = "/x/torch/distributed/distributed_c10d.py"
    assert (
        find_collective(stack(("cell", "f"), (torch_file, "wrapper"), (torch_file, "barrier"))) == "barrier"
    )
    assert (
        find_collective(stack((torch_file, "all_gather_object"), (torch_file, "all_gather")))
        == "all_gather_object"
    )
    assert find_collective(stack(("/x/notebook_accel/comm/torch_dist.py", "all_gather"))) == "all_gather"
    assert find_collective(stack(("/x/torch/autograd/graph.py", "_engine_run_backward"))) == BACKWARD
    assert find_collective(stack(("/x/notebook_accel/comm/torch_dist.py", "positions"))) == ""
    assert find_collective(stack(("/x/notebook_accel/comm/torch_dist.py", "<module>"))) == ""
