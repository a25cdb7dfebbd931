"""What tests of runs that outlive their notebook share: functions to launch, and their jobs' processes."""

from __future__ import annotations

from pathlib import Path

import psutil

from tests.notebooks.kernel import wait_until

SETUP = '''
import os, time
import psutil
import torch
from pathlib import Path
from notebook_accel import Accelerator, LaunchError, PartialState, attach, notebook_launcher, runs
from notebook_accel.utils import gather
from notebook_accel.launch.engines.slurm import detached
from tqdm.auto import tqdm
detached._LAST_SECONDS = 3.0  # all see one disk here

def launch(function, *args, num_nodes=2, **more):
    more.setdefault("num_processes", num_nodes)
    more.setdefault("view", "text")
    return notebook_launcher(function, args, engine="slurm", num_nodes=num_nodes, **{"detach": True, **more})

def train(folder, steps):
    accelerator = Accelerator()
    rank = accelerator.process_index
    for step in tqdm(range(steps), disable=rank > 0):
        print(f"step {step} of rank {rank}", flush=True)
        accelerator.log({"loss": 1.0 / (step + 1)}, step=step)
        if step == 1:
            Path(folder, f"began{rank}").touch()
            while not Path(folder, "go").exists() and not accelerator.should_stop:
                time.sleep(0.05)
        if accelerator.should_stop:
            return f"stopped at {step}"
    return gather(torch.tensor([rank + 1.5])).tolist()

def talk(folder, *names):
    """Wait for files, and tell of each; a file of the rank's own says that it has."""
    rank, folder = PartialState().process_index, Path(folder)
    (folder / f"began{rank}").touch()
    for name in names:
        while not (folder / name).exists():
            time.sleep(0.05)
        print("after", name, flush=True)
        (folder / f"{name}{rank}").touch()
    return rank

def see_steps(run):
    """Wait until a run has shown what ranks print before they wait."""
    while not all("step 1 of rank " + str(rank) in run.lines(rank) for rank in (0, 1)):
        time.sleep(0.05)

def list_asking():
    children = psutil.Process().children()
    return {child.pid for child in children if child.is_running() and child.name() == "scontrol"}
'''


def wait_for_ranks(folder: Path) -> None:
    files = [folder / "began0", folder / "began1"]
    assert wait_until(lambda: all(file.exists() for file in files), 150)


def list_drivers(jobs_folder: Path) -> list[psutil.Process]:
    """Return the processes of these jobs that start their ranks."""
    return [
        each
        for each in psutil.process_iter(["cmdline"])
        if (words := each.info["cmdline"] or [""])[1:2] == ["-m"] and words[-1].startswith(str(jobs_folder))
    ]
