"""Tells what is installed and what the machine can do; only `is_bf16_available` initialises a device."""

from __future__ import annotations

import operator
from typing import Final

import torch

from .. import devices, environ, probes
from ..tracking.table import BUILT_IN

_COMPARISONS: Final = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}


def compare_versions(library_or_version: str, operation: str, requirement_version: str) -> bool:
    """Compare the version of a library with another.

    Args:
        library_or_version: name of an installed library, or a version.
        operation: one of `==`, `!=`, `>=`, `>`, `<=`, `<`.
        requirement_version: the other version.

    Raises:
        ValueError: the operation is none of these.
    """
    from packaging.version import Version

    if operation not in _COMPARISONS:
        raise ValueError(f"operation {operation!r} is unknown, choose among {', '.join(_COMPARISONS)}")
    installed = Version(Version(probes.version(library_or_version) or library_or_version).base_version)
    return bool(_COMPARISONS[operation](installed, Version(requirement_version)))


def is_torch_version(operation: str, version: str) -> bool:
    """Compare torch's version with another, as in `is_torch_version(">=", "2.9")`.

    Args:
        operation: see `compare_versions`.
        version: the other version.
    """
    return compare_versions("torch", operation, version)


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return True if this machine computes in bfloat16. Its device is initialised to find out.

    Args:
        ignore_tpu: return False if a TPU computes.
    """
    if ignore_tpu and is_torch_xla_available(check_is_tpu=True):
        return False
    return devices.has_bf16(torch.device(devices.best(use_cpu=False).name))


def is_fp16_available() -> bool:
    """Return True: every device trains in float16, CPUs slowly and without recurrent layers."""
    return True


def is_cuda_available() -> bool:
    """Return True if there is a CUDA GPU."""
    return devices.count("cuda") > 0


def is_xpu_available(check_device: bool = False) -> bool:
    """Return True if there is an Intel GPU.

    Args:
        check_device: has no effect; Accelerate's signature has it.
    """
    return devices.count("xpu") > 0


def is_mps_available(min_version: str = "1.12") -> bool:
    """Return True if there is an Apple GPU.

    Args:
        min_version: has no effect; Accelerate's signature has it.
    """
    return devices.count("mps") > 0


def is_npu_available(check_device: bool = False) -> bool:
    """Return False: Ascend devices are not supported.

    Args:
        check_device: has no effect; Accelerate's signature has it.
    """
    return False


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return True if torch_xla is installed, and runs on a device of the kinds that are asked for.

    USE_TORCH_XLA=false says that programs are not to use it.

    Args:
        check_is_tpu: return True for a TPU.
        check_is_gpu: return True for a GPU.
    """
    kinds = ["TPU"] * check_is_tpu + ["CUDA", "GPU"] * check_is_gpu
    kind = (environ.get("PJRT_DEVICE") or "").partition("_")[0]
    is_wanted = environ.flag("USE_TORCH_XLA", default=True)
    return is_wanted and probes.is_available("torch_xla") and (not kinds or kind in kinds)


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
    return BUILT_IN["tensorboard"].is_installed


def is_wandb_available() -> bool:
    """Return True if wandb is installed."""
    return BUILT_IN["wandb"].is_installed


def is_trackio_available() -> bool:
    """Return True if trackio is installed."""
    return BUILT_IN["trackio"].is_installed


def is_aim_available() -> bool:
    """Return True if aim is installed, in a version below 4."""
    return BUILT_IN["aim"].is_installed


def is_comet_ml_available() -> bool:
    """Return True if comet_ml is installed."""
    return BUILT_IN["comet_ml"].is_installed


def is_mlflow_available() -> bool:
    """Return True if mlflow, or its small variant, is installed."""
    return BUILT_IN["mlflow"].is_installed


def is_clearml_available() -> bool:
    """Return True if clearml is installed."""
    return BUILT_IN["clearml"].is_installed


def is_dvclive_available() -> bool:
    """Return True if dvclive is installed."""
    return BUILT_IN["dvclive"].is_installed


def is_swanlab_available() -> bool:
    """Return True if swanlab is installed."""
    return BUILT_IN["swanlab"].is_installed


def is_tqdm_available() -> bool:
    """Return True if tqdm is installed."""
    return probes.is_available("tqdm")
