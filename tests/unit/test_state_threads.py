"""The dicts of the states in threads that are ranks."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from notebook_accel import PartialState, runtime
from tests.unit.clock import PATIENCE_S
from tests.unit.test_state_views import STATES, Holder

pytestmark = pytest.mark.usefixtures("clean_runtime")


def test_a_thread_that_is_a_rank_patches_its_own_state() -> None:
    PartialState(cpu=True)
    ours = runtime.current()
    assert ours is not None
    own = runtime.Runtime(topology=ours.topology, device=torch.device("meta"), comm=ours.comm)
    seen: list[Any] = []

    def work() -> None:
        runtime.install(own, for_thread=True)
        saved = PartialState._shared_state.copy()
        with mock.patch.object(PartialState, "_shared_state", {}):
            seen.append(PartialState(cpu=True).device.type)
        seen.append(runtime.current())
        PartialState._shared_state.clear()
        PartialState._shared_state.update(saved)
        seen.append(runtime.current())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == ["cpu", own, own] and runtime.current() is ours


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("kind", STATES)
def test_threads_that_are_ranks_leave_a_patch_in_any_order(kind: Any, first: int) -> None:
    ours = PartialState(cpu=True)._runtime
    before, seen = kind._shared_state, {}
    meet, left = threading.Barrier(2, timeout=PATIENCE_S), threading.Event()

    def work(rank: int) -> None:
        place = replace(ours.topology, rank=rank, local_rank=rank, world_size=2, local_world_size=2)
        own = runtime.Runtime(topology=place, device=ours.device, comm=ours.comm, accelerated=True)
        runtime.install(own, for_thread=True)
        meet.wait()
        with mock.patch.object(kind, "_shared_state", {}):
            meet.wait()
            with mock.patch.object(kind, "_shared_state", {}):
                kind._shared_state = {}
                meet.wait()
            inner = runtime.current()
            if rank != first:
                assert left.wait(PATIENCE_S)
        left.set()
        meet.wait()
        shared = PartialState._shared_state
        shown = vars(Holder(shared))
        Holder(shared).count = rank
        meet.wait()
        again = vars(Holder(PartialState._shared_state))
        seen[rank] = (
            inner,
            runtime.current() is own,
            shown["process_index"],
            again.get("count"),
            shown is again,
        )

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(2):
        inner, *others = seen[rank]
        assert others == [True, rank, rank, True]
        assert (inner is None) == (kind is PartialState)
    assert runtime.current() is ours and kind._shared_state is before
