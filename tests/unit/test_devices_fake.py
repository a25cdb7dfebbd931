"""An accelerator without a row is found by torch.accelerator; one under a listed name has its row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from notebook_accel import Accelerator, PartialState, devices, find_executable_batch_size
from notebook_accel.config import basic
from notebook_accel.memory import clear_device_cache, release_memory
from notebook_accel.precision import resolve
from notebook_accel.utils import is_bf16_available
from tests.unit import fake_cases, fake_device


def case_without_a_row(folder: Path) -> None:
    assert devices.list_initialized() == []
    kind = devices.best()
    assert kind == devices.kind_of("fake") and devices.count("fake") == kind.counter() == 3
    assert kind.label == "fake device" and devices.describe_count(3, kind) == "3 fake devices"
    assert kind.backend == "fccl" and kind.both_backends == "cpu:gloo,fake:fccl"
    assert kind.distributed_type == "MULTI_GPU" and kind.visible is None and kind.indexed
    assert [devices.device_for(kind, rank) for rank in range(4)] == [
        torch.device("fake", i) for i in (0, 1, 2, 0)
    ]
    assert basic.detect().num_processes == 3
    assert devices.list_initialized() == [], "counting starts no device"
    devices.use(torch.device("fake:2"))
    assert devices.list_initialized() == ["fake"] and fake_device.installed().current_device() == 2
    devices.use(torch.device("fake:0"))


def case_a_process_alone(folder: Path) -> None:
    state = PartialState()
    assert state.device.type == "fake" and state.distributed_type == "NO"
    assert resolve("bf16", state.device) == "bf16" and is_bf16_available()


def case_a_device_that_lacks_bfloat16(folder: Path) -> None:
    module = fake_device.installed()
    module.has_bf16 = False
    try:
        assert not is_bf16_available()
        with pytest.raises(ValueError, match=r"bf16.*fake device"):
            resolve("bf16", torch.device("fake:0"))
    finally:
        module.has_bf16 = True


def case_caches_are_emptied(folder: Path) -> None:
    module = fake_device.installed()
    tensor, before = torch.ones(1000, device="fake:1"), module.emptied
    assert module.memory_allocated(1) == 4000
    (tensor,) = release_memory(tensor)
    clear_device_cache()
    assert module.emptied == before + 2 and module.memory_allocated(1) == 0


def case_the_batch_size_that_fits(folder: Path) -> None:
    module, tried = fake_device.installed(), []

    @find_executable_batch_size(starting_batch_size=64, reduce_batch_size_fn=None)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        assert module.memory_allocated(0) == 0, "what the failed call held is free"
        rows = [torch.ones(2**20 // 4, device="fake:0") for _ in range(batch_size)]
        return len(rows)

    assert train() == tried[-1] < 16 and tried[0] == 64


def case_free_memory(folder: Path) -> None:
    module = fake_device.installed()
    accelerator = Accelerator()
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(2, 100, device=accelerator.device)).sum())
    optimizer.step()
    assert module.memory_allocated() > 4 * 100 * 100 * 4
    before = module.emptied
    model, optimizer = accelerator.free_memory(model, optimizer)
    assert module.memory_allocated() == 0 and module.emptied == before + 1


def case_profile(folder: Path) -> None:
    from notebook_accel.utils import ProfileKwargs

    accelerator = Accelerator()
    handler = ProfileKwargs(activities=["cpu", "fake"], output_trace_dir=str(folder))
    with accelerator.profile(handler) as profiler:
        torch.ones(3, device=accelerator.device).sum()
    assert any("sum" in event.key for event in profiler.key_averages())
    assert (folder / "profile_0.json").exists()


def case_under_a_listed_name(folder: Path) -> None:
    kind = devices.best()
    assert kind is devices.kind_of("npu") and devices.count("npu") == 2 and kind.backend == "hccl"
    accelerator = Accelerator()
    assert accelerator.device.type == "npu"
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(2, 3, device=accelerator.device)).sum())
    optimizer.step()
    accelerator.save_state(str(folder))
    drawn = torch.rand(3, device=accelerator.device)
    states = torch.load(folder / "random_states_0.pkl", weights_only=False)
    assert len(states["torch_npu_manual_seed"]) == 2
    accelerator.load_state(str(folder))
    assert torch.equal(drawn.cpu(), torch.rand(3, device=accelerator.device).cpu())


CASES = fake_cases.cases_of(globals())
LIMIT = 16 * 2**20


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, fake_cases.Outcomes]:
    listed = [case_under_a_listed_name]
    others = [case for case in CASES if case not in listed]
    folder = tmp_path_factory.mktemp("fake")
    found = fake_cases.run_cases(others, folder, count=3, limit=LIMIT)
    of_npu = fake_cases.run_cases(listed, folder, count=2, name="npu")
    return {case.__name__: of_npu if case in listed else found for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("case_"))
def test_on_a_fake(case: fake_cases.Case, outcomes: dict[str, fake_cases.Outcomes]) -> None:
    outcomes[case.__name__].check(case)
