"""What comparing checksums costs: loading files that have some beside the same files without, from the page cache."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from notebook_accel import Accelerator, load_checkpoint_in_model
from notebook_accel.checkpointing import names
from tests.benchmarks.table import Row, compare, interleave

ROUNDS = 9
LAYERS = 20
WIDTH = 3162  # 20 layers of 3162 x 3162 floats are 800 MB


def run() -> list[Row]:
    accelerator: Any = Accelerator(cpu=True)
    model: Any = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    where = Path(tempfile.mkdtemp())
    try:
        accelerator.save_state(where / "ours")
        strip(where / "ours", where / "without checksums")
        folders = {"ours": where / "ours", "without checksums": where / "without checksums"}

        def load_weights(folder: Path) -> None:
            load_checkpoint_in_model(model, folder / names.SAFE_MODEL)

        rows = []
        for what, load in (
            ("load_state", accelerator.load_state),
            ("load_checkpoint_in_model", load_weights),
        ):
            contenders = {name: lambda load=load, at=at: timed(load, at) for name, at in folders.items()}
            seconds = interleave(contenders, rounds=ROUNDS)
            target = 1.1 if what == "load_state" else None
            rows += compare(f"{what}, 800 MB, page-cached", seconds, {"without checksums": target})
        return rows
    finally:
        shutil.rmtree(where)


def strip(source: Path, target: Path) -> None:
    """Copy a checkpoint without its checksums."""
    shutil.copytree(source, target)
    (target / names.MANIFEST).unlink()
    save_file(load_file(target / names.SAFE_MODEL), target / names.SAFE_MODEL, {"format": "pt"})


def timed(load: Callable[[Path], object], folder: Path) -> float:
    for path in folder.iterdir():
        with open(path, "rb") as file:
            while file.read(1 << 24):
                pass
    started = time.perf_counter()
    load(folder)
    return time.perf_counter() - started


if __name__ == "__main__":
    for row in run():
        print(row)
