"""What is read out of torch's flight recorders."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist

from notebook_accel import probes
from notebook_accel.launch.worker.flight_recorder import read_recorder
from notebook_accel.launch.worker.order_listener import report_stack


def _entry(name: str, number: int, *, is_over: bool = False) -> dict[str, Any]:
    return {
        "profiling_name": name,
        "time_created_ns": number,
        "state": "completed" if is_over else "scheduled",
        "retired": is_over,
        "is_p2p": False,
        "p2p_seq_id": 0,
        "collective_seq_id": number,
        "process_group": ["0", "default_pg"],
        "input_sizes": [[3]],
        "input_dtypes": ["Float"],
    }


def _set_recorders(monkeypatch: pytest.MonkeyPatch, **entries: list[dict[str, Any]]) -> None:
    fake = types.ModuleType("torch._C._distributed_c10d")
    for name, found in entries.items():
        text = json.dumps({"entries": found})
        setattr(fake, f"_dump_{name}_trace_json", lambda text=text: text)
    monkeypatch.setitem(sys.modules, fake.__name__, fake)


def test_a_wait_in_gloo_is_read_where_nccl_was_used_too(monkeypatch: pytest.MonkeyPatch) -> None:
    done, waits = _entry("nccl:all_reduce", 1, is_over=True), _entry("gloo:all_gather", 2)
    _set_recorders(monkeypatch, nccl=[done], fr=[waits])
    (found,) = read_recorder()
    assert (found.name, found.is_over) == ("gloo:all_gather", False)


def test_waits_of_both_come_in_the_order_in_which_they_began(monkeypatch: pytest.MonkeyPatch) -> None:
    _set_recorders(monkeypatch, nccl=[_entry("nccl:broadcast", 3)], fr=[_entry("gloo:barrier", 2)])
    assert [found.name for found in read_recorder()] == ["gloo:barrier", "nccl:broadcast"]


def test_where_nothing_waits_the_last_of_both_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    last, first = _entry("nccl:all_reduce", 5, is_over=True), _entry("gloo:barrier", 4, is_over=True)
    _set_recorders(monkeypatch, nccl=[last], fr=[first])
    (found,) = read_recorder()
    assert (found.name, found.is_over) == ("nccl:all_reduce", True)
    _set_recorders(monkeypatch)
    assert read_recorder() == []


def test_a_thread_that_reads_the_result_of_a_collective_waits_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `all_reduce(tensor); tensor.item()` does with NCCL."""
    thread = threading.get_ident()
    _set_recorders(monkeypatch, nccl=[_entry("nccl:all_reduce", 1)])
    report = report_stack(thread, rank=1, time=0.0)
    assert (report.collective, report.rank) == ("all_reduce", 1)
    _set_recorders(monkeypatch, nccl=[_entry("nccl:all_reduce", 1, is_over=True)])
    assert report_stack(thread, rank=1, time=0.0).collective == ""


def test_what_began_before_a_call_of_a_session_is_none_of_its_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its group was replaced, because ranks disagreed about it: it never ends."""
    thread = threading.get_ident()
    _set_recorders(monkeypatch, fr=[_entry("gloo:all_reduce", 7)])
    assert report_stack(thread, rank=0, time=0.0, since_ns=7).collective == "all_reduce"
    assert report_stack(thread, rank=0, time=0.0, since_ns=8).collective == ""


@pytest.mark.skipif(
    not probes.at_least("torch", "2.11") and "TORCH_FR_BUFFER_SIZE" not in os.environ,
    reason="torch up to 2.10 records nothing of gloo unless TORCH_FR_BUFFER_SIZE is set",
)
def test_the_recorder_has_the_time_of_the_clock() -> None:
    before = time.time_ns()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(1))
        (found,) = read_recorder(before)
        assert found.name == "gloo:all_reduce"
        assert read_recorder(time.time_ns()) == []
    finally:
        dist.destroy_process_group()
