"""Forwards of a model of which half is on the disk, one sample at a time, beside Accelerate."""

from __future__ import annotations

import importlib
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from tests.benchmarks.table import Row, compare, interleave

BLOCKS, WIDTH, INNER = 16, 768, 3072
FORWARDS = 5
ROUNDS = 7
PACKAGES = {"ours": "notebook_accel", "accelerate": "accelerate"}


def run() -> list[Row]:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    places: dict[str, Any] = {str(n): "cpu" if n < BLOCKS // 2 else "disk" for n in range(BLOCKS)}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        save_file(make_network().state_dict(), file)
        models = {name: load(module, file, Path(folder) / name, places) for name, module in PACKAGES.items()}
        batch = torch.randn(1, WIDTH)
        with torch.no_grad():
            first, second = (model(batch) for model in models.values())
        if not torch.equal(first, second):
            raise AssertionError("the outputs differ")
        seconds = interleave(
            {name: time_forwards(model, batch) for name, model in models.items()}, rounds=ROUNDS
        )
    what = f"forward, {BLOCKS // 2} of {BLOCKS} blocks on the disk, batch of 1"
    return compare(what, seconds, {"accelerate": 0.7}, per=FORWARDS)


def make_network() -> nn.Module:
    """Return blocks of two layers each."""
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)) for _ in range(BLOCKS)
    ]
    return nn.Sequential(*blocks).eval()


def load(module: str, file: Path, folder: Path, places: dict[str, Any]) -> Any:
    """Return the model as a library offloads it."""
    package = importlib.import_module(module)
    with package.init_empty_weights():
        model = make_network()
    return package.load_checkpoint_and_dispatch(
        model, str(file), device_map=places, offload_folder=str(folder)
    )


def time_forwards(model: Any, batch: torch.Tensor) -> Callable[[], float]:
    """Return what makes forwards in a row and returns their seconds."""

    @torch.no_grad()
    def forwards() -> float:
        began = time.perf_counter()
        for _ in range(FORWARDS):
            model(batch)
        return time.perf_counter() - began

    return forwards
