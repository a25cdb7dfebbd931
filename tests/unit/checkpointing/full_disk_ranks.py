"""A program whose ranks save in the background on a disk that is too small, in a mount namespace; prints JSON.

python -m tests.unit.checkpointing.full_disk_ranks FOLDER KIND      # mounts 1 MB at the folder, for itself alone
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import torch

from notebook_accel import Accelerator, CheckpointError, FullyShardedDataParallelPlugin, notebook_launcher

MOUNT = ["mount", "-t", "tmpfs", "-o", "size=1m", "none"]
WIDTH = 300  # 360 KB of weights, 1.1 MB with AdamW's state


def train(where: str, kind: str) -> list[str]:
    """Return what this rank was told, by two saves."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if kind == "sharded" else None
    accelerator = Accelerator(fsdp_plugin=plugin)
    plain = torch.nn.Linear(WIDTH, WIDTH)
    prepared: Any = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters()))
    model, optimizer = prepared
    accelerator.backward(model(torch.ones(4, WIDTH)).sum())
    optimizer.step()
    told = []
    for _ in range(2):
        accelerator.save_state(f"{where}/saved", async_save=True)
        try:
            accelerator.end_training()
        except CheckpointError as error:
            told.append(str(error))
    return told


def main(where: str, kind: str) -> dict[str, Any]:
    told = notebook_launcher(
        train, (where, kind), num_processes=2, returns="all", hang_timeout=100, on_hang="raise"
    )
    return {"told": told, "left": sorted(os.listdir(where))}


if __name__ == "__main__":
    subprocess.run([*MOUNT, sys.argv[1]], check=True)
    print(json.dumps(main(*sys.argv[1:])))
