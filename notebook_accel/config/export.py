"""What a config tells processes: environment variables, under the names that torchrun and Accelerate give them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from .file import flat_values
from .option import Option, as_text
from .schema import LaunchConfig, matters, table

_LIBRARIES: Final = {
    "FSDP": "ACCELERATE_USE_FSDP",
    "DEEPSPEED": "ACCELERATE_USE_DEEPSPEED",
    "MEGATRON_LM": "ACCELERATE_USE_MEGATRON_LM",
}
_VISIBLE: Final = {
    "MULTI_XPU": "ZE_AFFINITY_MASK",
    "MULTI_MLU": "MLU_VISIBLE_DEVICES",
    "MULTI_SDAA": "SDAA_VISIBLE_DEVICES",
    "MULTI_MUSA": "MUSA_VISIBLE_DEVICES",
    "MULTI_NPU": "ASCEND_RT_VISIBLE_DEVICES",
    "MULTI_HPU": "HABANA_VISIBLE_MODULES",
    "MULTI_NEURON": "NEURON_RT_VISIBLE_CORES",
}
_FP8_PARTS: Final = ("FPROP", "DGRAD", "WGRAD")


def environment(config: LaunchConfig, chosen: Collection[str] = ()) -> dict[str, str]:
    """Return the variables of every process of a run.

    Options without a meaning beside the others say nothing, nor do those that are None; but what somebody chose for
    a library that is used is said, whether or not it has a meaning beside that library's other options: the library
    may have files of its own. Some options tell of their default only where somebody chose it, by its name.
    """
    values = flat_values(config)
    texts: dict[str, str] = {}
    for option in table():
        value = values[option.name]
        if option.face.env is None or value is None:
            continue
        if _is_told(option, values, option.name in chosen):
            texts[option.face.env] = as_text(value)
    if config.distributed_type in _LIBRARIES:
        texts[_LIBRARIES[config.distributed_type]] = "true"
    if config.mixed_precision == "fp8" and config.fp8_config.backend == "TE":
        parts = zip(_FP8_PARTS, config.fp8_config.override_linear_precision, strict=True)
        texts.update({f"ACCELERATE_FP8_OVERRIDE_{name}": as_text(value) for name, value in parts})
    if config.gpu_ids not in (None, "all"):
        texts[_VISIBLE.get(config.distributed_type, "CUDA_VISIBLE_DEVICES")] = config.gpu_ids.replace(" ", "")
    return {**texts, **config.environment}


def _is_told(option: Option, values: Mapping[str, Any], is_chosen: bool) -> bool:
    if is_chosen:
        return matters(option, values, but_within=option.path[0])
    is_default = values[option.name] == option.default
    return matters(option, values) and not (is_default and option.face.quiet_default)
