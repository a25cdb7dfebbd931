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
