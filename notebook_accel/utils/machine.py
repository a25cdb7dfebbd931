"""What Accelerate's launchers ask about this machine and this process; no device is initialised."""

from __future__ import annotations

import logging
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from .. import devices
from .other import get_int_from_env

_FORBIDDEN: Final = (";", "\n", "<", ">", " ")
_KINDS: Final = ("mlu", "sdaa", "musa", "npu", "hpu", "cuda", "xpu", "neuron")
_FP8_CAPABILITY: Final = (8, 9)
_WITHOUT_PEERS: Final = ("RTX 40",)
_DRIVER_WITH_PEERS: Final = "550.40.07"
_SECONDS: Final = 30


@dataclass
class CPUInformation:
    """The place of this process in the run, as torch's or MPI's launcher tells it.

    Attributes:
        rank: of this process.
        world_size: number of processes.
        local_rank: rank on this node.
        local_world_size: number of processes on this node.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Return the place of this process in the run, from the variables of torch's or MPI's launcher."""
    return CPUInformation(
        rank=get_int_from_env(("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"), 0),
        world_size=get_int_from_env(
            ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"), 1
        ),
        local_rank=get_int_from_env(
            ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"), 0
        ),
        local_world_size=get_int_from_env(
            (
                "LOCAL_WORLD_SIZE",
                "MPI_LOCALNRANKS",
                "OMPI_COMM_WORLD_LOCAL_SIZE",
                "MV2_COMM_WORLD_LOCAL_SIZE",
            ),
            1,
        ),
    )


def get_current_device_type() -> tuple[str, str]:
    """Return the kind of device of this machine, CUDA where there is none, and what a run on several is called."""
    kind = next((kind for kind in _KINDS if devices.count(kind)), "cuda")
    return kind, f"MULTI_{'GPU' if kind == 'cuda' else kind.upper()}"


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Return lines `NAME=value` for a file of variables; those that a shell could misread are left out, with a warning.

    Args:
        current_env: the variables.
    """
    lines = []
    for name, text in current_env.items():
        if name and text and not any(character in name + text for character in _FORBIDDEN):
            lines.append(f"{name}={text}\n")
        else:
            reason = "it is empty, or has one of ; < > and spaces"
            logging.getLogger(__name__).warning("%s=%s is left out: %s", name, text, reason)
    return lines


def get_gpu_info() -> tuple[list[str], int]:
    """Return the names of NVIDIA's GPUs, and how many there are.

    Raises:
        OSError: there is no nvidia-smi.
        subprocess.CalledProcessError: it failed.
    """
    names = _ask("name")
    return names, len(names)


def get_driver_version() -> str:
    """Return the version of NVIDIA's driver; see `get_gpu_info` for errors."""
    return _ask("driver_version")[0]


def check_cuda_fp8_capability() -> bool:
    """Return True if this process's GPU computes in float8; this initialises CUDA."""
    return torch.cuda.get_device_capability() >= _FP8_CAPABILITY


def check_cuda_p2p_ib_support() -> bool:
    """Return False if the GPUs of this machine cannot send to each other with the driver that it has."""
    from packaging.version import Version

    try:
        names, count = get_gpu_info()
        if count < 2 or not any(word in name for name in names for word in _WITHOUT_PEERS):
            return True
        return Version(get_driver_version()) >= Version(_DRIVER_WITH_PEERS)
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return True


def _ask(what: str) -> list[str]:
    """Return what nvidia-smi says of each GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        raise FileNotFoundError("nvidia-smi is not on the path")
    words = [program, f"--query-gpu={what}", "--format=csv,noheader"]
    text = subprocess.run(words, capture_output=True, text=True, check=True, timeout=_SECONDS).stdout
    return [line.strip() for line in text.splitlines() if line.strip()]
