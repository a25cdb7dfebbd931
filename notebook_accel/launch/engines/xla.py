"""Processes on XLA devices, TPU chips above all: one for each chip, or one that uses all of them.

They start as all our workers do, so output, errors, values, interrupts and restarts are the same; before the function
each finds its chip as `chips` says. `torch_xla.launch` is not used: it drops what the function returns, and its
processes could be neither heard nor stopped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Final

from ... import devices, environ, tpu
from ...stream.record import RunRecord
from .. import chips
from ..control import Control
from ..job import Job
from .base import Deliver, Outcome
from .elastic import ElasticEngine

_OPEN_FILES: Final = "/proc/self/fd"


class XlaEngine(ElasticEngine):
    """Starts a process for each chip of this machine, or one for all, as `tpu_mode` says."""

    name = "xla"
    device_kind = devices.XLA
    refuses: ClassVar[Mapping[str, str]] = {
        "num_nodes": "it uses the chips of this machine; on a pod each machine runs the code as a script, which "
        "`gcloud compute tpus tpu-vm ssh --worker=all` starts on all",
        "address": "it starts processes on this machine, by itself",
    }

    def count(self, job: Job) -> int:
        """Return a process for each chip, 1 where one shards or where there is no TPU."""
        if job.tpu_mode == "spmd" or not tpu.is_here(job.environment):
            return 1
        return tpu.num_processes(job.environment)

    def problems(self, job: Job) -> Sequence[str]:
        """Return why a job cannot run on this machine's XLA devices."""
        texts = _of_processes(job) if job.tpu_mode == "process" else []
        if job.serve is not None:
            texts.append(
                "a session runs on GPUs and CPUs: environment={'ACCELERATE_USE_CPU': 'true'} starts it on CPUs"
            )
        if held := _held_files():
            texts.append(
                f"this process has started the TPU's runtime and holds its chips ({', '.join(held)}), and each can "
                "belong to one process only: restart the kernel and launch before anything here uses the TPU"
            )
        return texts

    def prepares(self, job: Job) -> Callable[[], None]:
        """Return what finds a worker's chip."""
        return chips.shard if job.tpu_mode == "spmd" else chips.join

    def load(self, job: Job) -> bool:
        """Import torch_xla, and torch's compiler, which comes with it; return whether that was due."""
        return job.start_method != "spawn" and chips.load()

    def remark(self, job: Job) -> str:
        """Return why no fork was made, where this process has started the runtime."""
        if chips.is_started() and job.start_method != "fork":
            return "the XLA runtime was initialised in this kernel, so fresh processes run the function"
        return ""

    def run(self, job: Job, record: RunRecord, deliver: Deliver, control: Control) -> Outcome:
        """Run the job; ShipError or LaunchError where it cannot start."""
        device = {"PJRT_DEVICE": tpu.pjrt_device(job.environment)}
        return super().run(replace(job, environment={**device, **job.environment}), record, deliver, control)


def _of_processes(job: Job) -> list[str]:
    """Return why there cannot be a process for each chip."""
    several, on_tpu = job.local_world_size > 1, tpu.is_here(job.environment)
    every = tpu.num_processes(job.environment) if on_tpu else 1
    texts = []
    if several and job.local_world_size != every:
        texts.append(
            f"num_processes={job.local_world_size}: a run on XLA devices has 1 process or all {every} that this "
            "machine has chips for"
        )
    if several and on_tpu and tpu.devices_per_chip() > 1:
        texts.append(
            f"each of this TPU's chips is {tpu.devices_per_chip()} devices (v2 and v3), which one process cannot use "
            "as one: tpu_mode='spmd' uses all of them from one process, num_processes=1 one of them"
        )
    visible = tpu.visible_chips()
    if several and 1 < len(visible) < tpu.chips(job.environment):
        texts.append(
            f"TPU_VISIBLE_CHIPS={','.join(visible)} has {len(visible)} of {tpu.chips(job.environment)} chips, and a "
            "run takes one or all: name one chip, or unset it"
        )
    if tpu.pjrt_device(job.environment) == "CPU" and (environ.integer("CPU_NUM_DEVICES", 1) or 1) > 1:
        texts.append(
            f"CPU_NUM_DEVICES={environ.get('CPU_NUM_DEVICES')}: a process has one device; unset it, or choose "
            "tpu_mode='spmd'"
        )
    return texts


def _held_files() -> list[str]:
    """Return the device files of TPU chips that this process has open."""
    found = set()
    try:
        numbers = os.listdir(_OPEN_FILES)
    except OSError:
        return []
    for number in numbers:
        try:
            found.add(os.readlink(f"{_OPEN_FILES}/{number}"))
        except OSError:
            continue  # it was the one that lists them
    files = {Path(text) for text in found if text.startswith(("/dev/accel", "/dev/vfio/"))}
    return sorted(str(path) for path in files if path.name != "vfio")
