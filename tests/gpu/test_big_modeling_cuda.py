"""A model over a GPU, the CPU and the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from notebook_accel import (
    cpu_offload,
    cpu_offload_with_hook,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    utils,
)
from tests.unit.big_models import INPUT, Words, save, words

pytestmark = pytest.mark.usefixtures("on_gpu")

MAP: dict[str, Any] = {
    "words": 0,
    "head": 0,
    "blocks.0": 0,
    "blocks.1": 0,
    "blocks.2": "cpu",
    "blocks.3": "cpu",
    "blocks.4": "disk",
    "blocks.5": "disk",
}


@torch.no_grad()
def output(model: Any) -> torch.Tensor:
    return model(INPUT)


@pytest.mark.parametrize("form", ["safetensors", "plain safetensors", "bin"])
def test_parts_on_gpu_cpu_and_disk(tmp_path: Path, form: str) -> None:
    expected = output(words().to("cuda").requires_grad_(False).cpu())
    with init_empty_weights():
        model = Words().eval()
    model = load_checkpoint_and_dispatch(
        model, save(words(), tmp_path / "m", form), MAP, offload_folder=tmp_path / "off"
    )
    assert model.blocks[0].first.weight.device == torch.device("cuda", 0)
    assert model.blocks[2].first.weight.is_meta and model.blocks[4].first.weight.is_meta
    assert model.words.weight is model.head.weight
    first = output(model)
    assert first.device.type == "cpu", "the output comes to where the input was"
    assert torch.allclose(first, expected, atol=1e-4)
    for _ in range(5):  # fetched ahead on a stream of their own
        assert torch.equal(output(model), first)


def test_no_memory_stays_on_the_gpu_between_forwards(tmp_path: Path) -> None:
    with init_empty_weights():
        model = Words(width=256).eval()
    file = save(words(width=256), tmp_path)
    places = MAP | {f"blocks.{number}": "disk" for number in range(6)}
    model = load_checkpoint_and_dispatch(model, file, places)
    output(model)
    torch.cuda.synchronize()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        output(model)
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.memory_reserved() <= 2 * reserved, (
        "fetches are in one stream, whose memory is used again"
    )
    largest = max(tensor.nbytes for tensor in words(width=256).state_dict().values())
    assert torch.cuda.max_memory_allocated() - before < 4 * largest


def test_offload_to_the_cpu() -> None:
    model = cpu_offload(words(), "cuda")
    assert torch.allclose(output(model), output(words()), atol=1e-4)
    model, hook = cpu_offload_with_hook(words())
    output(model)
    assert model.words.weight.device.type == "cuda"
    hook.offload()
    assert model.words.weight.device.type == "cpu"


def test_maps_of_this_machine() -> None:
    limits = utils.get_max_memory()
    assert limits[0] > 0 and list(limits)[-1] == "cpu"
    assert utils.infer_auto_device_map(words()) == {"": 0}


def test_a_map_made_for_gpus_cpu_and_disk(tmp_path: Path) -> None:
    expected = output(words(width=64))
    sizes = utils.compute_module_sizes(words(width=64))
    block = sizes["blocks.0"]
    count = torch.cuda.device_count()
    # of the six blocks two for the first GPU, one for a second, and one for the CPU
    limits: dict[int | str, int] = dict.fromkeys(range(min(count, 2)), block + block // 2)
    limits[0] += sizes["words"] + 2 * block
    limits["cpu"] = 2 * block + block // 2  # and room for what comes from the disk
    with init_empty_weights():
        model = Words(width=64).eval()
    model = load_checkpoint_and_dispatch(
        model,
        save(words(width=64), tmp_path / "m"),
        "auto",
        max_memory=limits,
        no_split_module_classes=["Block"],
        offload_folder=tmp_path / "off",
    )
    places = set(model.hf_device_map.values())
    assert {"cpu", "disk"} < places and places - {"cpu", "disk"} <= set(range(count)), model.hf_device_map
    if count > 1:
        assert {0, 1} < places, model.hf_device_map
    for _ in range(3):
        torch.testing.assert_close(output(model), expected, atol=1e-4, rtol=1e-4)


def test_limits_leave_a_tenth_of_what_is_free() -> None:
    torch.cuda.empty_cache()
    limits = utils.get_max_memory()
    assert list(limits) == [*range(torch.cuda.device_count()), "cpu"]
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        assert abs(limits[number] - 0.9 * free) < 0.05 * total
    half = limits[0] // 2
    held = torch.empty(min(half, 1 << 30), dtype=torch.uint8, device="cuda:0")
    assert utils.get_max_memory()[0] < limits[0] - held.nbytes // 2


def test_a_device_without_number_is_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 CUDA devices, this machine has {torch.cuda.device_count()}")
    expected = output(words())
    with torch.cuda.device(1):
        model = cpu_offload(words(), "cuda")
        for _ in range(3):
            torch.testing.assert_close(output(model), expected, atol=1e-4, rtol=1e-4)
    assert torch.cuda.memory_allocated(1) > 0


@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_weights_of_several_parts_arrive_whole(tmp_path: Path, place: str, mode: str) -> None:
    def make() -> torch.nn.Sequential:
        return torch.nn.Sequential(*[torch.nn.Linear(3200, 3200) for _ in range(8)]).eval()  # 39 MiB each

    torch.manual_seed(0)
    whole = make()
    path = save(whole, tmp_path / "m", "safetensors")
    with init_empty_weights():
        model = make()
    model = load_checkpoint_and_dispatch(
        model,
        path,
        {"0": 0, **{str(number): place for number in range(1, 8)}},
        offload_folder=tmp_path / "off",
    )
    whole, inputs = whole.cuda(), torch.rand(2048, 3200, device="cuda")
    with getattr(torch, mode)():
        expected = whole(inputs)
        for _ in range(4):  # the stream that computes is busy while the next weights come
            assert torch.equal(model(inputs), expected)
