"""save_state and load_state of an 800 MB model with AdamW, and the peak memory of each, beside Accelerate."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.subprocesses import ROOT
from tests.benchmarks.table import Row, compare

ROUNDS = 3
LAYERS = 20
WIDTH = 3162  # 20 layers of 3162 x 3162 floats are 800 MB


def run() -> list[Row]:
    seconds: dict[str, dict[str, list[float]]] = {}
    for number in range(ROUNDS):
        order = ["ours", "accelerate"] if number % 2 else ["accelerate", "ours"]
        for name in order:
            found = measure_in_process(name)
            for what, value in found.items():
                seconds.setdefault(what, {}).setdefault(name, []).append(value)
    seconds["async"]["accelerate"] = seconds["save"]["accelerate"]
    rows = compare("save_state, 800 MB and AdamW", seconds["save"], {"accelerate": 0.8})
    rows += compare("load_state of it", seconds["load"], {"accelerate": 0.8})
    rows += compare(
        "first async save_state returns",
        seconds["first async"] | {"accelerate": seconds["save"]["accelerate"]},
        {},
    )
    rows += compare("next async save_state returns", seconds["async"], {"accelerate": 0.05})
    for what in ("save", "load"):
        rows += compare(f"peak of {what}, GB for s", seconds[f"{what} GB"], {"accelerate": 1.01})
    return rows


def measure_in_process(name: str) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.benchmarks.bench_checkpoint", name]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak_gb() -> float:
    """Return the peak of resident memory since `reset_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1e6


def measure(name: str) -> dict[str, float]:
    accelerator = make_accelerator(name)
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    found: dict[str, float] = {}
    where = tempfile.mkdtemp()
    try:
        for what, call in (
            ("save", lambda: accelerator.save_state(f"{where}/kept")),
            ("load", lambda: accelerator.load_state(f"{where}/kept")),
        ):
            reset_peak()
            started = time.perf_counter()
            call()
            found[what] = time.perf_counter() - started
            found[f"{what} GB"] = peak_gb()
        if name == "ours":
            for what in ("first async", "async"):
                started = time.perf_counter()
                accelerator.save_state(f"{where}/kept", async_save=True)
                found[what] = time.perf_counter() - started
                accelerator._wait_for_writer()
    finally:
        shutil.rmtree(where)
    return found


def make_accelerator(name: str) -> Any:
    import accelerate

    import notebook_accel

    return notebook_accel.Accelerator(cpu=True) if name == "ours" else accelerate.Accelerator(cpu=True)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
