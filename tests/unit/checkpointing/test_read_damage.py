"""Tests for checkpoints that are damaged or do not fit: an error that names what, and nothing changed."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from notebook_accel import Accelerator, CheckpointError
from notebook_accel.checkpointing import names, pickled, weights
from tests.unit.checkpoints import Counter, make_loader, make_parts, step, values

pytestmark = pytest.mark.usefixtures("clean_runtime")


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Accelerator, Any, Path]:
    """Return an accelerator, its parts, and a checkpoint of other values."""
    accelerator = Accelerator(cpu=True)
    parts = accelerator.prepare(*make_parts())
    accelerator.prepare(make_loader())
    accelerator.register_for_checkpointing(Counter(3))
    step(accelerator, *parts)
    where = accelerator.save_state(tmp_path / "kept")
    step(accelerator, *parts)
    accelerator._custom_objects[0].value = 8
    return accelerator, parts, where


def refuses(saved: tuple[Accelerator, Any, Path], match: str) -> None:
    accelerator, parts, where = saved
    before = values(*parts), accelerator.step, random.getstate(), torch.get_rng_state().tolist()
    with pytest.raises(CheckpointError, match=match):
        accelerator.load_state(where)
    assert (values(*parts), accelerator.step, random.getstate(), torch.get_rng_state().tolist()) == before
    assert accelerator._custom_objects[0].value == 8


FILES = (
    names.SAFE_MODEL,
    names.OPTIMIZER,
    names.SCHEDULER,
    names.SAMPLER,
    names.random_states(0),
    names.custom(0),
)


@pytest.mark.parametrize(
    ("name", "manifest"),
    [(name, manifest) for name in FILES for manifest in (True, False) if manifest or name != names.SAMPLER],
)
def test_truncated_files(saved: tuple[Accelerator, Any, Path], name: str, manifest: bool) -> None:
    """Without a manifest it is Accelerate's checkpoint, whose sampler files are not read."""
    where = saved[2]
    if not manifest:
        (where / names.MANIFEST).unlink()
    whole = (where / name).read_bytes()
    choose = random.Random(name)
    for cut in [0, 1, 7, 8, len(whole) - 1, *(choose.randrange(len(whole)) for _ in range(25))]:
        (where / name).write_bytes(whole[:cut])
        refuses(saved, name)
    (where / name).write_bytes(whole)
    saved[0].load_state(where)


@pytest.mark.parametrize("name", FILES[:3] + FILES[4:])
def test_foreign_and_missing_files(saved: tuple[Accelerator, Any, Path], name: str) -> None:
    where = saved[2]
    (where / name).write_bytes(b"PK\x03\x04 this is something else")
    refuses(saved, rf"{name} has 27 bytes, it was written with")
    (where / names.MANIFEST).unlink()
    refuses(saved, name)
    (where / name).unlink()
    if name != names.random_states(0):
        refuses(saved, name)


def test_a_checkpoint_of_others_without_random_states(saved: tuple[Accelerator, Any, Path]) -> None:
    """Accelerate loads what there is; our own list of files would name it."""
    accelerator, _, where = saved
    (where / names.MANIFEST).unlink()
    (where / names.random_states(0)).unlink()
    before = torch.get_rng_state().tolist()
    with pytest.warns(UserWarning, match="has no random_states_0.pkl"):
        assert accelerator.load_state(where)
    assert torch.get_rng_state().tolist() == before


def test_a_missing_file_that_the_manifest_lists(saved: tuple[Accelerator, Any, Path]) -> None:
    (saved[2] / names.SAMPLER).unlink()
    refuses(saved, "sampler.bin is missing, though notebook_accel.json lists it")
    (saved[2] / names.MANIFEST).write_text('{"version": 1, "fil')
    refuses(saved, "notebook_accel.json is damaged")
    (saved[2] / names.MANIFEST).write_text('{"version": 2, "files": {}}')
    refuses(saved, "is of version 2")


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Change what a file holds; the manifest goes, as its sizes are true no more."""
    (path.parent / names.MANIFEST).unlink(missing_ok=True)
    content = weights.read(path) if path.suffix == ".safetensors" else pickled.read(path)
    change(content)
    if path.suffix == ".safetensors":
        weights.write(path, content, {})
    else:
        pickled.write(path, content)


EDITS: list[tuple[str, Callable[[Any], Any], str]] = [
    ("model.safetensors", lambda c: c.pop("0.weight"), "model.safetensors has no weights for '0.weight'"),
    ("model.safetensors", lambda c: c.update({"9.bias": torch.ones(1)}), "does not know: '9.bias'"),
    (
        "model.safetensors",
        lambda c: c.update({"0.weight": torch.ones(8, 5)}),
        r"model.safetensors: '0.weight' has shape \[8, 5\], the model's \[8, 4\]",
    ),
    ("optimizer.bin", lambda c: c.pop("state"), "optimizer.bin has no key 'state'"),
    ("optimizer.bin", lambda c: c["param_groups"][0]["params"].pop(), r"hold \[5\] parameters, .* \[6\]"),
    ("optimizer.bin", lambda c: c["state"][2].pop("exp_avg"), "parameter 2 has no key 'exp_avg'"),
    (
        "optimizer.bin",
        lambda c: c["state"][0].update(exp_avg_sq=torch.ones(3)),
        r"optimizer.bin: 'exp_avg_sq' of parameter 0 has shape \[3\], the optimizer's \[8, 4\]",
    ),
    ("scheduler.bin", lambda c: c.pop("last_epoch"), "scheduler.bin has no key 'last_epoch'"),
    ("random_states_0.pkl", lambda c: c.pop("torch_manual_seed"), "has no key 'torch_manual_seed'"),
    (
        "random_states_0.pkl",
        lambda c: c.update(random_state=(3, (1, 2), None)),
        "random_states_0.pkl holds random states that do not fit",
    ),
]


@pytest.mark.parametrize(("name", "change", "match"), EDITS)
def test_contents_that_do_not_fit(
    saved: tuple[Accelerator, Any, Path], name: str, change: Callable[[Any], Any], match: str
) -> None:
    edit(saved[2] / name, change)
    refuses(saved, match)


@pytest.mark.parametrize("kind", ["model.safetensors", "optimizer.bin", "scheduler.bin"])
def test_another_number_of_objects(saved: tuple[Accelerator, Any, Path], kind: str) -> None:
    where = saved[2]
    shutil.copy(where / kind, where / names.with_index(kind, 1))
    what = {"model": "models", "optimizer": "optimizers", "scheduler": "schedulers"}[kind.split(".")[0]]
    refuses(saved, f"holds 2 {what}, and this accelerator has 1")
    (where / names.with_index(kind, 1)).unlink()
    if kind != "scheduler.bin":
        part = torch.nn.Linear(1, 1)
        saved[0].prepare(part if kind[0] == "m" else torch.optim.SGD(part.parameters()))
        refuses(saved, f"holds 1 {what}, and this accelerator has 2: it has no {names.with_index(kind, 1)}")


def test_a_registered_object_that_refuses_its_state(saved: tuple[Accelerator, Any, Path]) -> None:
    accelerator, parts, where = saved
    second = Counter(5)
    accelerator.register_for_checkpointing(second)
    pickled.write(where / names.custom(1), {"value": -1})
    before = values(*parts)
    with pytest.raises(ValueError, match="below zero"):
        accelerator.load_state(where)
    assert values(*parts) == before
    assert [item.value for item in accelerator._custom_objects] == [8, 5]


def test_a_model_that_loads_by_itself_gets_its_weights_back(tmp_path: Path) -> None:
    class Own(torch.nn.Linear):
        def _load_from_state_dict(self, *arguments: Any) -> None:
            super()._load_from_state_dict(*arguments)
            if bool((self.bias > 1).any()):
                raise RuntimeError("a bias above one")

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Own(2, 2))
    before = model.weight.clone()
    where = accelerator.save_state(tmp_path / "kept")
    edit(where / names.SAFE_MODEL, lambda c: c.update(bias=torch.full((2,), 2.0), weight=torch.zeros(2, 2)))
    with pytest.raises(CheckpointError, match=r"model.safetensors does not fit the model: a bias above one"):
        accelerator.load_state(where)
    assert torch.equal(model.weight, before)
