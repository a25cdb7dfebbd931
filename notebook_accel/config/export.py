"""What a config tells processes: environment variables, by the names that torchrun and Accelerate give them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from .. import devices
from .option import as_texts
from .schema import LaunchConfig, values_for_workers

_LIBRARIES: Final = {
    "FSDP": "ACCELERATE_USE_FSDP",
    "DEEPSPEED": "ACCELERATE_USE_DEEPSPEED",
    "MEGATRON_LM": "ACCELERATE_USE_MEGATRON_LM",
}
_VISIBLE: Final = {
    kind.distributed_type: str(kind.visible) for kind in (devices.CUDA, devices.XPU, *devices.EXTENSIONS)
}
_FP8_PARTS: Final = ("FPROP", "DGRAD", "WGRAD")


def environment(config: LaunchConfig, chosen: Collection[str] = ()) -> dict[str, str]:
    """Return the variables of every process of a run.

    An option that has no effect beside the others sets no variable, nor does one that is None. An option that
    somebody chose sets its variable also where only other options of its section take its effect away: a library may
    have files of its own. Some options set it for their default only where somebody chose that.

    Args:
        config: all options.
        chosen: the names of the options that somebody gave a value, be it the default.
    """
    values = values_for_workers(config, chosen)
    if config.distributed_type in _LIBRARIES:
        values[_LIBRARIES[config.distributed_type]] = True
    if config.mixed_precision == "fp8" and config.fp8_config.backend == "TE":
        parts = zip(_FP8_PARTS, config.fp8_config.override_linear_precision, strict=True)
        values.update({f"ACCELERATE_FP8_OVERRIDE_{name}": value for name, value in parts})
    if config.gpu_ids not in (None, "all"):
        visible = _VISIBLE.get(config.distributed_type, str(devices.CUDA.visible))
        values[visible] = config.gpu_ids.replace(" ", "")
    return {**as_texts(values), **config.environment}
