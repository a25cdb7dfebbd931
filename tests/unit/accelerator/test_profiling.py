"""Accelerator.profile: what is recorded, and the traces that it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import ProfileKwargs as TheirProfileKwargs

from notebook_accel.accelerator import Accelerator
from notebook_accel.handlers import ProfileKwargs
from tests.unit.multiprocess import run_ranks


def work() -> None:
    torch.ones(8, 8) @ torch.ones(8, 8)


def names_in(path: Path) -> set[str]:
    return {event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]}


def ranks_profile(folder: str) -> list[str]:
    accelerator = Accelerator(kwargs_handlers=[ProfileKwargs(activities=["cpu"], output_trace_dir=folder)])
    with accelerator.profile() as profiler:
        work()
    assert any(event.key == "aten::mm" for event in profiler.key_averages())
    return sorted(path.name for path in Path(folder).iterdir())  # all are there once one has left the block


def test_each_process_writes_its_trace(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "traces"
    assert run_ranks(ranks_profile, str(folder)) == [["profile_0.json", "profile_1.json"]] * 2
    assert "aten::mm" in names_in(folder / "profile_1.json")


def test_a_handler_of_the_call_counts_more(clean_runtime: None, tmp_path: Path) -> None:
    ready: list[int] = []
    accelerator = Accelerator(
        cpu=True, kwargs_handlers=[ProfileKwargs(output_trace_dir=str(tmp_path / "not"))]
    )
    handler = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 1, "warmup": 1, "active": 1, "repeat": 2},
        on_trace_ready=lambda profiler: ready.append(profiler.step_num),
        record_shapes=True,
        output_trace_dir=str(tmp_path / "yes"),
    )
    with accelerator.profile(handler) as profiler:
        for _ in range(7):
            work()
            profiler.step()
    assert ready == [3, 6] and not (tmp_path / "not").exists()
    assert "aten::mm" in names_in(tmp_path / "yes" / "profile_0.json")


def test_without_a_folder_nothing_is_written(clean_runtime: None, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with Accelerator(cpu=True).profile() as profiler:
        work()
    assert profiler.key_averages() and not list(tmp_path.iterdir())


def test_a_schedule_that_recorded_nothing_is_explained(clean_runtime: None, tmp_path: Path) -> None:
    handler = ProfileKwargs(
        schedule_option={"wait": 5, "warmup": 1, "active": 1}, output_trace_dir=str(tmp_path / "traces")
    )
    accelerator = Accelerator(cpu=True)
    with (
        pytest.raises(RuntimeError, match=r"recorded nothing in 2 steps .*call step\(\)"),
        accelerator.profile(handler) as profiler,
    ):
        profiler.step()
        profiler.step()


def test_wrong_options() -> None:
    with pytest.raises(
        ValueError, match=r"activities \['gpu'\] are unknown, choose 'cpu' or kinds of devices"
    ):
        ProfileKwargs(activities=["cpu", "gpu"])
    with pytest.raises(ValueError, match="are unknown, choose 'cpu'"):
        ProfileKwargs(activities=[torch.profiler.ProfilerActivity.CPU])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="needs wait, warmup and active"):
        ProfileKwargs(schedule_option={"wait": 1})
    with pytest.raises(ValueError, match="needs wait, warmup and active"):
        ProfileKwargs(schedule_option={"wait": 1, "warmup": 1, "active": 1, "often": 2})
    with pytest.raises(ValueError, match=r"activities \['mtia'\] cannot be recorded here"):
        ProfileKwargs(activities=["mtia"]).build()


def test_what_this_machine_cannot_record_is_left_out() -> None:
    with pytest.warns(UserWarning, match=r"activities \['mtia'\] cannot be recorded here and are left out"):
        profiler = ProfileKwargs(activities=["cpu", "mtia"]).build()
    assert profiler.activities == {torch.profiler.ProfilerActivity.CPU}


def test_fields_and_profiler_are_accelerates() -> None:
    options: dict[str, Any] = {"activities": ["cpu"], "record_shapes": True, "with_flops": True}
    ours, theirs = ProfileKwargs(**options), TheirProfileKwargs(**options)
    assert ours.to_dict() == theirs.to_dict() and ours.to_kwargs() == theirs.to_kwargs()
    mine, other = ours.build(), theirs.build()
    for name in ("activities", "record_shapes", "with_flops", "with_stack", "profile_memory", "with_modules"):
        assert getattr(mine, name) == getattr(other, name)
