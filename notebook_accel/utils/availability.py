"""What is installed and what the machine can do, one question each; no question initialises a device."""

from __future__ import annotations

import operator
from typing import Final

import torch

from .. import devices, environ, probes
from ..tracking import LoggerType, is_installed

_COMPARISONS: Final = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}


def compare_versions(library_or_version: str, operation: str, requirement_version: str) -> bool:
    """Return whether the installed version of a library stands in the relation to another; ValueError for others."""
    from packaging.version import Version

    if operation not in _COMPARISONS:
        raise ValueError(f"operation {operation!r} is unknown, choose among {', '.join(_COMPARISONS)}")
    installed = Version(Version(probes.version(library_or_version) or library_or_version).base_version)
    return bool(_COMPARISONS[operation](installed, Version(requirement_version)))


def is_torch_version(operation: str, version: str) -> bool:
    """Return whether torch's version stands in the relation to another, as `is_torch_version(">=", "2.9")`."""
    return compare_versions("torch", operation, version)


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return True if this machine computes in bfloat16; a CUDA GPU is asked, which initialises it.

    `ignore_tpu` makes it False where a TPU is what computes.
    """
    if ignore_tpu and is_torch_xla_available(check_is_tpu=True):
        return False
    if devices.count("cuda"):
        return bool(torch.cuda.is_bf16_supported())
    return True


def is_fp16_available() -> bool:
    """Return True: every device trains in float16, CPUs slowly and without recurrent layers."""
    return True


def is_cuda_available() -> bool:
    """Return True if there is a CUDA GPU."""
    return devices.count("cuda") > 0


def is_xpu_available(check_device: bool = False) -> bool:
    """Return True if there is an Intel GPU."""
    return devices.count("xpu") > 0


def is_mps_available(min_version: str = "1.12") -> bool:
    """Return True if there is an Apple GPU."""
    return devices.count("mps") > 0


def is_npu_available(check_device: bool = False) -> bool:
    """Return False: Ascend devices are not supported."""
    return False


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return True if torch_xla is installed, and set to a TPU or a GPU where that is asked for."""
    kinds = ["TPU"] * check_is_tpu + ["CUDA", "GPU"] * check_is_gpu
    kind = (environ.get("PJRT_DEVICE") or "").partition("_")[0]
    return probes.is_available("torch_xla") and (not kinds or kind in kinds)


def is_datasets_available() -> bool:
    """Return True if datasets is installed."""
    return probes.is_available("datasets")


def is_transformers_available() -> bool:
    """Return True if transformers is installed."""
    return probes.is_available("transformers")


def is_deepspeed_available() -> bool:
    """Return True if deepspeed is installed."""
    return probes.is_available("deepspeed")


def is_pandas_available() -> bool:
    """Return True if pandas is installed."""
    return probes.is_available("pandas")


def is_tensorboard_available() -> bool:
    """Return True if tensorboard or tensorboardX is installed."""
    return is_installed(LoggerType.TENSORBOARD)


def is_wandb_available() -> bool:
    """Return True if wandb is installed."""
    return is_installed(LoggerType.WANDB)


def is_trackio_available() -> bool:
    """Return True if trackio is installed."""
    return is_installed(LoggerType.TRACKIO)


def is_aim_available() -> bool:
    """Return True if aim is installed, in a version below 4."""
    return is_installed(LoggerType.AIM)


def is_comet_ml_available() -> bool:
    """Return True if comet_ml is installed."""
    return is_installed(LoggerType.COMETML)


def is_mlflow_available() -> bool:
    """Return True if mlflow, or its small variant, is installed."""
    return is_installed(LoggerType.MLFLOW)


def is_clearml_available() -> bool:
    """Return True if clearml is installed."""
    return is_installed(LoggerType.CLEARML)


def is_dvclive_available() -> bool:
    """Return True if dvclive is installed."""
    return is_installed(LoggerType.DVCLIVE)


def is_swanlab_available() -> bool:
    """Return True if swanlab is installed."""
    return is_installed(LoggerType.SWANLAB)


def is_tqdm_available() -> bool:
    """Return True if tqdm is installed."""
    return probes.is_available("tqdm")
