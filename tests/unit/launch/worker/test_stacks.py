"""Where a thread is, and in which collective."""

from __future__ import annotations

import threading
import types
from typing import Any

import notebook_accel.comm.base  # noqa: F401 - which a process that is in a collective has imported
from notebook_accel.launch.worker.stacks import BACKWARD, describe_users_frames, find_collective, read_stack
from tests.unit.clock import wait_in


def test_the_frames_of_a_thread_are_read_from_outside() -> None:
    go = threading.Event()

    def stand() -> None:
        go.wait(60)

    thread = threading.Thread(target=stand)
    thread.start()
    assert thread.ident is not None
    wait_in(thread, "wait")
    stack = read_stack(thread.ident)
    go.set()
    thread.join()
    assert "stand" in [frame.name for frame in describe_users_frames(stack)] and find_collective(stack) == ""
    assert read_stack(thread.ident) == []


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
