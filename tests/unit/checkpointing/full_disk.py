"""A program that fills a small disk with checkpoints, in a mount namespace of its own; prints JSON.

python -m tests.unit.checkpointing.full_disk FOLDER      # mounts 6 MB at the folder, for itself alone
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from notebook_accel import Accelerator, CheckpointError, FullyShardedDataParallelPlugin, notebook_launcher
from tests.unit.checkpoints import values

MOUNT = ["mount", "-t", "tmpfs", "-o", "size=6m", "none"]
WIDTH = 600  # 1.4 MB of weights, 4.3 MB with AdamW's state: one checkpoint fits, a second one does not


def train(accelerator: Accelerator, model: Any, optimizer: Any, scheduler: Any) -> None:
    accelerator.backward(model(torch.ones(1, WIDTH)).sum())
    optimizer.step()
    scheduler.step()


def save_shards(where: Path) -> str:
    """Return the error by which two ranks cannot write their parts."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.prepare(torch.nn.Linear(2 * WIDTH, 2 * WIDTH))
    try:
        accelerator.save_state(where)
    except CheckpointError as error:
        return str(error)
    return ""


def main(where: Path) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    parts: Any = accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2))
    train(accelerator, *parts)
    kept = accelerator.save_state(where / "kept")
    wanted = values(*parts)
    train(accelerator, *parts)
    errors = []
    for safe in (True, False):
        for background in (False, True):
            try:
                accelerator.save_state(kept, safe, async_save=background)
                accelerator.end_training()
            except CheckpointError as error:
                errors.append(str(error))
    left = sorted(os.listdir(where))
    whole = torch.nn.Linear(2 * WIDTH, 2 * WIDTH)  # 5.8 MB
    named = {}
    for name, save in {
        "weights/model.safetensors": lambda: accelerator.save_model(whole, where / "weights"),
        "weights/pytorch_model.bin": lambda: accelerator.save_model(whole, where / "weights", "10GB", False),
        "object.bin": lambda: accelerator.save(whole.state_dict(), where / "object.bin"),
        "object.safetensors": lambda: accelerator.save(
            whole.state_dict(), where / "object.safetensors", safe_serialization=True
        ),
    }.items():
        try:
            save()
        except OSError as error:
            named[name] = str(error)
    (sharded,) = set(
        notebook_launcher(save_shards, (where / "sharded",), num_processes=2, returns="all", view="none")
    )
    accelerator.load_state(kept)
    (kept / "optimizer.bin").unlink()  # room for another
    accelerator.save_state(kept)
    return {
        "errors": errors,
        "named": named,
        "sharded": sharded,
        "left": left,
        "same": values(*parts) == wanted,
        "then": sorted(os.listdir(where)),
    }


if __name__ == "__main__":
    subprocess.run([*MOUNT, sys.argv[1]], check=True)
    print(json.dumps(main(Path(sys.argv[1]))))
