"""Models whose weights are on the disk, as users treat them: layers of torch, errors, threads, other dtypes."""

from __future__ import annotations

import copy
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from notebook_accel import (
    CheckpointError,
    cpu_offload,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from notebook_accel.checkpointing import shards
from notebook_accel.hooks import attach_layerwise_casting_hooks, remove_hook_from_submodules
from tests.unit.big_models import INPUT, save, words
from tests.unit.clock import PATIENCE_S

ROWS = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))


class Chain(nn.Module):
    """Layers one after the other; `before` is called before the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.before: Callable[[], Any] = list

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:3]:
            x = layer(x)
        self.before()
        last = self.layers[3]
        assert isinstance(last, nn.Linear)
        return nn.functional.linear(last(x), last.weight, last.bias) if self.before is borrow else last(x)


def borrow() -> None:
    """Say that the last layer's weight is used without a call of the layer."""


class Mixed(nn.Module):
    """Tensors of the model itself: empty, scalar, and of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.randn(0, 3))
        self.one = nn.Parameter(torch.tensor(2.0))
        self.small = nn.Parameter(torch.randn(16).bfloat16())
        self.register_buffer("flags", torch.ones(3, dtype=torch.bool))
        self.register_buffer("tiny", torch.ones(16).to(torch.float8_e4m3fn))
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.one + self.none.sum() + self.small + self.tiny.float() + self.flags.sum()


def on_disk(make: Callable[[], nn.Module], folder: Path, **options: Any) -> tuple[Any, Any]:
    """Return a model, and one with all of its weights on the disk."""
    torch.manual_seed(0)
    model = make().eval()
    save_file(model.state_dict(), folder / "model.safetensors")
    with init_empty_weights():
        empty = make().eval()
    return model, load_checkpoint_and_dispatch(empty, folder, {"": "disk"}, **options)


def same(model: nn.Module, other: nn.Module) -> bool:
    with torch.no_grad():
        found, expected = (one(ROWS) for one in (other, model))
    return torch.equal(*(item[0] if isinstance(item, tuple) else item for item in (found, expected)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTM(16, 16, 2, batch_first=True),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2),
        Mixed,
    ],
    ids=["LSTM", "TransformerEncoder", "mixed"],
)
@pytest.mark.filterwarnings("ignore")
def test_layers_of_torch(tmp_path: Path, make: Any) -> None:
    for options in ({}, {"offload_buffers": True}):
        model, other = on_disk(make, tmp_path, **options)
        assert all(tensor.is_meta for tensor in other.parameters())
        assert same(model, other) and same(model, other)
        assert all(tensor.is_meta for tensor in other.parameters())


@pytest.mark.filterwarnings("ignore")
def test_tensors_that_a_map_names_alone(tmp_path: Path) -> None:
    model, _ = on_disk(Mixed, tmp_path)
    names = ("none", "one", "small", "flags", "tiny", "layer.bias")
    for place in ("cpu", "disk"):
        device_map = dict.fromkeys(names, place) | {"layer.weight": "disk"}
        with init_empty_weights():
            empty = Mixed()
        other = load_checkpoint_and_dispatch(empty, tmp_path, device_map, offload_buffers=True)
        assert same(model, other) and same(model, other)


def test_a_forward_that_ends_early_leaves_nothing_behind(tmp_path: Path) -> None:
    model, other = on_disk(Chain, tmp_path)
    assert same(model, other)

    def interrupt() -> None:
        raise KeyboardInterrupt

    other.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        other(ROWS)
    assert all(tensor.is_meta for tensor in other.parameters())
    layer, rows = other.layers[0], torch.zeros(3)
    for _ in range(2):  # in the layer itself
        with pytest.raises(RuntimeError):
            layer(rows)
        assert layer.weight.is_meta
    other.before = borrow
    with pytest.raises((RuntimeError, NotImplementedError), match="meta") as caught:
        other(ROWS)
    if hasattr(caught.value, "__notes__"):
        assert "name its class in preload_module_classes" in caught.value.__notes__[0]
    other.before = model.before
    assert same(model, other)
    attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32)
    with pytest.raises(RuntimeError):
        model.layers[0](rows)
    assert model.layers[0].weight.dtype == torch.bfloat16


class Waiting(nn.Linear):
    """A layer whose first call waits while its weights are there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not INSIDE.is_set():
            INSIDE.set()
            DONE.wait(0.3)  # as long as another thread would need to come here and go
        return super().forward(x)


INSIDE, DONE = threading.Event(), threading.Event()


def test_threads_take_turns(tmp_path: Path) -> None:
    INSIDE.set()
    model, other = on_disk(lambda: nn.Sequential(nn.Linear(16, 16), Waiting(16, 16)), tmp_path)
    INSIDE.clear()
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(same(model, other)))
    thread.start()
    assert INSIDE.wait(PATIENCE_S)
    results.append(same(model, other))
    DONE.set()
    thread.join(PATIENCE_S)
    assert results == [True, True]


def test_a_fork_in_the_middle_of_a_forward(tmp_path: Path) -> None:
    model, other = on_disk(Chain, tmp_path)
    inside, forked = threading.Event(), threading.Event()
    other.before = lambda: (inside.set(), forked.wait(PATIENCE_S))
    thread = threading.Thread(target=other, args=(ROWS,))
    thread.start()
    assert inside.wait(PATIENCE_S)
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        other.before = list
        os._exit(0 if same(model, other) else 1)
    forked.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_other_dtypes_copies_and_compiled_models(tmp_path: Path) -> None:
    model, other = on_disk(Chain, tmp_path)
    compiled = torch.compile(other, backend="eager")
    for _ in range(2):
        assert same(model, compiled)
    assert same(model, copy.deepcopy(other))
    assert other.bfloat16()(ROWS.bfloat16()).dtype == torch.bfloat16
    assert torch.equal(other(ROWS.bfloat16()), model.bfloat16()(ROWS.bfloat16()))
    with pytest.raises(RuntimeError, match=r"model\.cpu\(\): parts of this model are on the CPU or the disk"):
        other.cpu()


def test_of_both_formats_safetensors_are_read(tmp_path: Path) -> None:
    model, other = on_disk(Chain, tmp_path)
    wrong = {name: tensor * 0 for name, tensor in model.state_dict().items()}
    torch.save(wrong, tmp_path / "pytorch_model.bin")
    _, other = on_disk(Chain, tmp_path)
    assert same(model, other)
    (tmp_path / "model.safetensors").unlink()
    shards.save_weights(model.state_dict(), tmp_path / "parts", "2KB")
    torch.save(wrong, tmp_path / "parts" / "pytorch_model.bin")
    with init_empty_weights():
        empty = Chain()
    assert same(model, load_checkpoint_and_dispatch(empty, tmp_path / "parts", {"": "disk"}))


def test_arguments_that_cannot_be(tmp_path: Path) -> None:
    model = Chain()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with init_empty_weights():
        empty = Chain()
    for device in (99, "cuda:99"):
        with pytest.raises(
            ValueError, match=r"puts 'layers.0' on .*99'?, and torch finds \d+ \w+ devices here"
        ):
            load_checkpoint_and_dispatch(
                empty, tmp_path, {"": "disk", "layers.0": device}, offload_folder=tmp_path / "away"
            )
        with pytest.raises(ValueError, match="devices here"):
            dispatch_model(model, {"": device})
    assert not (tmp_path / "away").exists()
    with pytest.raises(ValueError, match="max_memory says bytes for each device"):
        load_checkpoint_and_dispatch(empty, tmp_path, "auto", max_memory="1GB")  # type: ignore[arg-type]
    for dtype in ("int8", 8):
        with pytest.raises(ValueError, match=f"dtype {dtype!r}"):
            load_checkpoint_and_dispatch(model, tmp_path, dtype=dtype)  # type: ignore[arg-type]
    assert model.layers[0].weight.dtype == torch.float32
    with pytest.raises(ValueError, match=r"no values for 'layers.0.weight', .* they are on the meta device"):
        cpu_offload(empty, "cpu")
    with pytest.raises(ValueError, match=r"no values for 'layers.0.bias', .* the state_dict has none"):
        cpu_offload(model, "cpu", state_dict={"layers.0.weight": torch.ones(16, 16)})
    with pytest.raises(ValueError, match=r"pytorch_model.bin is a file"):
        disk_offload(model, tmp_path / "pytorch_model.bin")
    for text, error in (('{"weight_map": {}}', "lists none"), ('{"a": 5}', "is no index of weights")):
        (tmp_path / "wrong.index.json").write_text(text)
        with pytest.raises(CheckpointError, match=error):
            load_checkpoint_and_dispatch(empty, tmp_path / "wrong.index.json", {"": "cpu"})
    entry = {"safetensors_file": str(tmp_path / "model.safetensors"), "dtype": "floaty"}
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    for wrong, error in ((entry, "dtype 'floaty' in the index"), ({}, "no dtype and no shape")):
        with pytest.raises(CheckpointError, match=error):
            dispatch_model(
                empty,
                {"": "disk"},
                offload_dir=tmp_path,
                offload_index=dict.fromkeys(model.state_dict(), wrong),
            )
    assert not any("_hf_hook" in vars(part) for part in (*model.modules(), *empty.modules()))


@pytest.mark.parametrize("way", ["dispatch", "safetensors", "bin"])
@pytest.mark.parametrize("is_offloaded", [True, False])
def test_a_model_without_its_hooks_has_its_weights_back(tmp_path: Path, way: str, is_offloaded: bool) -> None:
    places = dict.fromkeys(("words", "head", *(f"blocks.{number}" for number in range(5))), "disk")
    places["blocks.5"] = "cpu"
    options: dict[str, Any] = {"offload_buffers": is_offloaded}
    wanted = words()(INPUT)
    if way == "dispatch":
        model: nn.Module = dispatch_model(words(), places, offload_dir=tmp_path, **options)
    else:
        file = save(words(), tmp_path / "saved", way)
        with init_empty_weights():
            empty = words()
        empty.register_buffer("steps", torch.arange(5)[:, None], persistent=False)
        model = load_checkpoint_and_dispatch(
            empty, file, places, offload_folder=tmp_path / "offload", **options
        )
    assert torch.equal(model(INPUT), wanted)
    with pytest.raises(RuntimeError, match="remove_hook_from_submodules") as advice:
        model.to(torch.float64)
    assert "remove_hook_from_submodules(model)" in str(advice.value)
    remove_hook_from_submodules(model)
    shutil.rmtree(tmp_path)
    assert torch.equal(model(INPUT), wanted)
    taken = words().state_dict()
    assert all(torch.equal(value, taken[name]) for name, value in model.state_dict().items())
    assert model.head.weight is model.words.weight
    copy.deepcopy(model.to(torch.float64))(INPUT).sum().backward()
    model(INPUT).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
