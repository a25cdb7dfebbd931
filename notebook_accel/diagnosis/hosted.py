"""Recognises Kaggle and Google Colab, and says what this machine has and what a launch would do on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import psutil

from .. import devices, environ, probes, tpu
from ..launch import preflight
from ..launch.checks import fork_safety
from ..launch.checks.problems import raise_all
from ..launch.request import LaunchRequest
from .environment import gpus

KAGGLE: Final = "Kaggle"
COLAB: Final = "Google Colab"
MENUS: Final = {
    KAGGLE: "Settings > Accelerator",
    COLAB: "Runtime > Change runtime type",
}
"""Where each place offers GPUs and TPUs."""
_FOLDER: Final = Path("/content")  # where Colab's notebooks work


def find_place() -> str:
    """Return the service on whose machine this process runs, `KAGGLE` or `COLAB`; empty elsewhere.

    Kaggle builds its images from those of Colab, whose signs they may have too. So Kaggle's own signs count first.
    """
    if environ.get("KAGGLE_KERNEL_RUN_TYPE") or environ.get("KAGGLE_URL_BASE"):
        return KAGGLE
    if environ.get("COLAB_RELEASE_TAG") or (_FOLDER.is_dir() and probes.has_module("google.colab")):
        return COLAB
    return ""


def describe_machine() -> str:
    """Return the devices, cores and memory of this machine, such as `2 CUDA GPUs (Tesla T4), 4 CPU cores, 29 GiB`.

    Raises:
        ValueError: a variable asks for a device that there is not.
    """
    kind = devices.best()
    if devices.count(kind) == 0:  # asked for, and not here
        kind = devices.find_first()
    names: list[str] = []
    if kind is devices.CUDA:
        names = sorted({gpu.name for gpu in gpus()})
    elif kind is devices.XLA and (model := environ.get("TPU_ACCELERATOR_TYPE")):
        names = [model]
    found = [] if kind is devices.CPU else [devices.describe_count(devices.count(kind), kind)]
    if kind is devices.CPU and tpu.is_here() and not environ.flag("ACCELERATE_USE_CPU"):
        found = [f"a TPU (chips: {tpu.chips()})"]  # which torch_xla is missing for
    if names:
        found[0] += f" ({', '.join(names)})"
    if kind is devices.XLA and tpu.is_here() and tpu.devices_per_chip() > 1:
        found[0] += f", each chip {tpu.devices_per_chip()} devices"
    cores, memory = devices.share_of_cores(1), psutil.virtual_memory().total / 2**30
    return ", ".join([*found, f"{cores} CPU cores", f"{memory:.0f} GiB of memory"])


def lacks_accelerator() -> bool:
    """Return whether this machine has no GPU, TPU or the like, and nobody has asked for its CPU.

    A TPU counts also where torch_xla is not installed.

    Raises:
        ValueError: a variable asks for a device that there is not.
    """
    wanted = devices.find_requested()
    asked = environ.flag("ACCELERATE_USE_CPU") or (wanted is not None and wanted.type == "cpu")
    return not asked and not tpu.is_here() and devices.find_first() is devices.CPU


def describe_launch() -> tuple[str, devices.DeviceKind]:
    """Return what `notebook_launcher(train)` would do here, and the kind of device that it computes on.

    It is a sentence such as `Launching train on 2 CUDA GPU processes (forked).` Nothing is started and no device
    initialised.

    Raises:
        ValueError: such a launch is refused; the message has every reason.
    """
    problems: list[Exception] = []
    job, engine = preflight.resolve(LaunchRequest(function=_stand_in), "notebook_launcher")
    start_method = job.start_method
    if engine.has_workers and engine.on_this_node:
        start_method = fork_safety.resolve_start_method(problems, job)
    if problems:
        raise_all(problems, "notebook_launcher")
    return engine.announce(replace(job, name="train", start_method=start_method)).detail, job.device_kind


def _stand_in() -> None:
    """Take the place of the function that a user launches."""
