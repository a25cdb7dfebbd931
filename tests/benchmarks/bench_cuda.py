"""On a GPU: a training step, and a model that is offloaded in part.

There are no rows without a GPU.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.benchmarks.table import Row, compare, interleave

ROUNDS = 20
STEPS = 100
BATCH = 32
FORWARDS = 5
WIDTH, INNER, BLOCKS = 1024, 4096, 16
PRECISIONS = ("no", "bf16")


def run() -> list[Row]:
    """Return rows against torch alone, and against Accelerate."""
    if not torch.cuda.is_available():
        return []
    found: list[Row] = []
    for precision in PRECISIONS:
        found += step(precision)
    return found + offloaded()


def step(precision: str) -> list[Row]:
    """A step of a small network on batches that are on the GPU already, over torch alone and Accelerate."""
    contenders: dict[str, Callable[[], float]] = {"raw torch": _by_hand(precision)}
    for name, library in _libraries():
        contenders[name] = _prepared(library, precision)
    label = {"no": "training step on a GPU", "bf16": "bf16 step on a GPU"}[precision]
    return compare(label, interleave(contenders, rounds=ROUNDS), {"raw torch": 1.02}, per=STEPS)


def _libraries() -> list[tuple[str, Any]]:
    import accelerate

    import notebook_accel

    return [("ours", notebook_accel), ("accelerate", accelerate)]


def _parts() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, optimizer, torch.rand(BATCH, 256).cuda(), torch.randint(0, 10, (BATCH,)).cuda()


def _by_hand(precision: str) -> Callable[[], float]:
    model, optimizer, features, labels = _parts()

    def epoch() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(STEPS):
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=precision == "bf16"):
                out = model(features)
            nn.functional.cross_entropy(out.float(), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    return epoch


def _prepared(library: Any, precision: str) -> Callable[[], float]:
    library.state.AcceleratorState._reset_state(True)
    accelerator = library.Accelerator(mixed_precision=precision)
    own, plain, features, labels = _parts()
    model, optimizer = accelerator.prepare(own, plain)

    def epoch() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(STEPS):
            accelerator.backward(nn.functional.cross_entropy(model(features), labels))
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    return epoch


def offloaded() -> list[Row]:
    """Forwards of a model of which a quarter each stays on the CPU and the disk, over Accelerate."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        file = Path(folder) / "model.safetensors"
        from safetensors.torch import save_file

        save_file(_network().state_dict(), file)
        places: dict[str, Any] = {str(n): 0 for n in range(BLOCKS // 2)}
        places |= {str(n): "cpu" for n in range(BLOCKS // 2, BLOCKS * 3 // 4)}
        places |= {str(n): "disk" for n in range(BLOCKS * 3 // 4, BLOCKS)}
        contenders: dict[str, Callable[[], float]] = {}
        for name, library in _libraries():
            with library.init_empty_weights():
                model = _network()
            model = library.load_checkpoint_and_dispatch(
                model, str(file), device_map=places, offload_folder=str(Path(folder) / name)
            )
            contenders[name] = lambda model=model: _forward(model)
        seconds = interleave(contenders, rounds=ROUNDS // 2)
    return compare("forward on a GPU, half of it offloaded", seconds, {"accelerate": 0.7}, per=FORWARDS)


def _network() -> nn.Module:
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)) for _ in range(BLOCKS)
    ]
    return nn.Sequential(*blocks).eval()


@torch.no_grad()
def _forward(model: Any) -> float:
    batch = torch.ones(1, WIDTH, device="cuda")
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(FORWARDS):
        model(batch)
    torch.cuda.synchronize()
    return time.perf_counter() - began
