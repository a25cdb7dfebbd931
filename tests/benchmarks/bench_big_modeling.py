"""load_checkpoint_and_dispatch with half of 800 MB on the disk, then the forward, beside Accelerate."""

from __future__ import annotations

import gc
import importlib
import shutil
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.benchmarks.table import Row, compare, interleave

ROUNDS = 5
LAYERS = 20
WIDTH = 3162  # 20 layers of 3162 x 3162 floats are 800 MB
BATCHES = (1, 64)
MAP: dict[str, Any] = {str(number): "cpu" if number < LAYERS // 2 else "disk" for number in range(LAYERS)}
PACKAGES = {"ours": "notebook_accel", "accelerate": "accelerate"}


def run() -> list[Row]:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    where = Path(tempfile.mkdtemp())
    state = {f"{number}.weight": torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for number in range(LAYERS)}
    inputs = [torch.randn(size, WIDTH) for size in BATCHES]
    try:
        save_file(state, where / "model.safetensors")
        rows: list[Row] = []
        for kind, file in (("", where / "model.safetensors"), (", saved by us", save_by_us(state, where))):
            rows += measure(file, inputs, kind)
        return rows
    finally:
        shutil.rmtree(where)


def save_by_us(state: dict[str, torch.Tensor], where: Path) -> Path:
    from notebook_accel.checkpointing import weights

    weights.write(where / "ours.safetensors", state, {})
    return where / "ours.safetensors"


def measure(file: Path, inputs: list[torch.Tensor], kind: str) -> list[Row]:
    seconds = interleave(
        {name: lambda name=name: time_load(name, file)[0] for name in PACKAGES}, rounds=ROUNDS
    )
    rows = compare(f"load, half of 800 MB on the disk{kind}", seconds, {"accelerate": 0.2})
    models = {name: time_load(name, file, keep=True) for name in PACKAGES}
    with torch.no_grad():
        for batch in inputs:
            ours, theirs = (model(batch) for _, model, _ in models.values())
            if not torch.equal(ours, theirs):
                raise AssertionError("the outputs differ")
            seconds = interleave(
                {
                    name: lambda model=model, batch=batch: time_forward(model, batch)
                    for name, (_, model, _) in models.items()
                },
                rounds=ROUNDS,
            )
            rows += compare(f"forward of it, batch of {len(batch)}{kind}", seconds, {"accelerate": 1.0})
    for _, _, folder in models.values():
        shutil.rmtree(folder)
    return rows


def time_load(name: str, file: Path, *, keep: bool = False) -> tuple[float, Any, Path]:
    package = importlib.import_module(PACKAGES[name])
    folder = Path(tempfile.mkdtemp(dir=file.parent))
    with package.init_empty_weights():
        model: Any = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    started = time.perf_counter()
    model = package.load_checkpoint_and_dispatch(model, str(file), device_map=MAP, offload_folder=str(folder))
    taken = time.perf_counter() - started
    if name == "ours" and list(folder.iterdir()):
        raise AssertionError("weights were copied")
    if not keep:
        shutil.rmtree(folder)
        del model
        gc.collect()
        return taken, None, folder
    return taken, model, folder


def time_forward(model: Any, batch: torch.Tensor) -> float:
    started = time.perf_counter()
    model(batch)
    return time.perf_counter() - started


if __name__ == "__main__":
    from tests.benchmarks.table import render

    print(render(run()))
