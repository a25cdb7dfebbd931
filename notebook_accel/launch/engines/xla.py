"""Processes on XLA devices, mostly TPU chips: one process for each chip, or one process that uses all chips.

They start as the workers of `local` do, so output, errors, values, interrupts and restarts work in the same
way. Each worker prepares its chip before it calls the function; see `checks.xla_runtime`. `torch_xla.launch` is not
used: it drops the return value of the function, and it has no way to stop its processes or to show their output by
rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final

from ... import devices, environ, tpu
from ...config.launch_options import StartMethod
from ...stream.record import RunRecord
from ..checks import xla_runtime
from ..job import Job
from ..supervise.control import Control
from ..supervise.delivery import Deliver
from .base import Outcome
from .local import LocalEngine

_OPEN_FILES: Final = "/proc/self/fd"


class XlaEngine(LocalEngine):
    """Starts one process for each TPU chip of this machine, or one for all chips, as `tpu_mode` says."""

    name = "xla"
    device_kind = devices.XLA
    refuses: ClassVar[Mapping[str, str]] = {
        "num_nodes": "it uses the chips of this machine; on a pod each machine runs the code as a script, which "
        "`gcloud compute tpus tpu-vm ssh --worker=all` starts on all",
        "address": "it starts processes on this machine, by itself",
    }

    def count(self, options: Mapping[str, Any], kind: devices.DeviceKind) -> int:
        """Return the number of TPU chips; 1 with `tpu_mode="spmd"` or without a TPU.

        Args:
            options: arguments of `notebook_launcher` by name.
            kind: not used here.
        """
        environment = options["environment"]
        if options["tpu_mode"] == "spmd" or not tpu.is_here(environment):
            return 1
        return tpu.num_processes(environment)

    def problems(self, job: Job) -> Sequence[str]:
        """Return why a job cannot run on the XLA devices of this machine.

        Args:
            job: what is to run.
        """
        texts = _find_process_problems(job) if job.tpu_mode == "process" else []
        if job.serve is not None:
            texts.append(
                "a session runs on GPUs and CPUs: environment={'ACCELERATE_USE_CPU': 'true'} starts it on CPUs"
            )
        if held := _find_held_files():
            texts.append(
                f"this process has started the TPU's runtime and holds its chips ({', '.join(held)}), and each can "
                "belong to one process only: restart the kernel and launch before anything here uses the TPU"
            )
        return texts

    def worker_setup(self, job: Job) -> Callable[[], None]:
        """Return the function that prepares a worker's chip, or all chips with `tpu_mode="spmd"`.

        Args:
            job: what is to run.
        """
        return xla_runtime.shard if job.tpu_mode == "spmd" else xla_runtime.join

    def preload(self, job: Job, start_method: StartMethod) -> bool:
        """Import torch_xla, which imports torch's compiler too.

        Args:
            job: what is to run.
            start_method: how its workers will start.

        Returns:
            Whether anything was imported.
        """
        return start_method == "fork" and xla_runtime.load()

    def remark(self, job: Job) -> str:
        """Say why workers are not forked, if this process has started the XLA runtime.

        Args:
            job: what is to run, its start method resolved.
        """
        if xla_runtime.is_started() and job.start_method != "fork":
            return "the XLA runtime was initialised in this kernel, so fresh processes run the function"
        return ""

    def run(self, job: Job, record: RunRecord, deliver: Deliver, control: Control) -> Outcome:
        """Run the job to its end; see `Engine.run`."""
        device = {"PJRT_DEVICE": tpu.pjrt_device(job.environment)}
        return super().run(replace(job, environment={**device, **job.environment}), record, deliver, control)


def _find_process_problems(job: Job) -> list[str]:
    """Return why a job cannot have one process for each chip."""
    several, on_tpu = job.local_world_size > 1, tpu.is_here(job.environment)
    num_chips = tpu.num_processes(job.environment) if on_tpu else 1
    texts = []
    if several and job.local_world_size != num_chips:
        texts.append(
            f"num_processes={job.local_world_size}: a run on XLA devices has 1 process or all {num_chips} that this "
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


def _find_held_files() -> list[str]:
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
            continue  # the descriptor of the listing itself, which is closed now
    files = {Path(text) for text in found if text.startswith(("/dev/accel", "/dev/vfio/"))}
    return sorted(str(path) for path in files if path.name != "vfio")
