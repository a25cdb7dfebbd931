"""The arguments of DeepSpeedPlugin that DeepSpeed's config has too: their keys, variables and checks."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Final

from .. import environ
from .config import AUTO, HfDeepSpeedConfig

KEYS: Final = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
"""Where DeepSpeed's config has each argument."""

DEFAULTS: Final[Mapping[str, Any]] = {
    "gradient_accumulation_steps": AUTO,
    "gradient_clipping": AUTO,
    "zero_stage": 2,
    "offload_optimizer_device": "none",
    "offload_param_device": "none",
    "offload_optimizer_nvme_path": None,
    "offload_param_nvme_path": None,
    "zero3_save_16bit_model": False,
}

_VARIABLES: Final = {
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "offload_optimizer_nvme_path": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
    "offload_param_nvme_path": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
    "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
}
_DEVICES: Final = ("none", "cpu", "nvme")
_SECTIONS: Final = (
    "zero_optimization",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
    "fp16",
    "bf16",
    "optimizer",
    "scheduler",
)
_TYPED_SECTIONS: Final = ("optimizer", "scheduler")
_CHECKED_KEYS: Final = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_optimization",
    "optimizer",
    "scheduler",
)
"""Keys that DeepSpeed ignores silently where they are misspelt."""
_SIMILARITY: Final = 0.85
"""The least similarity, by `difflib`, of a misspelt key and the right one."""


def read_environment() -> dict[str, Any]:
    """Return the arguments that environment variables set, by name.

    Raises:
        ValueError: the value of a variable is not legal; the message names it.
    """
    found = {}
    for name, variable in _VARIABLES.items():
        text = environ.get(variable)
        if not text or text == "none":
            continue
        try:
            found[name] = _parse(name, text)
        except ValueError:
            raise ValueError(
                f"environment variable {variable}={text!r} is no legal value of {name}"
            ) from None
    return found


def _parse(name: str, text: str) -> Any:
    if text == AUTO or name.startswith("offload_"):
        return text
    if name == "zero3_save_16bit_model":
        return environ.parse_bool(text)
    return float(text) if name == "gradient_clipping" else int(text)


def check_arguments(given: Mapping[str, Any], own: HfDeepSpeedConfig | None) -> list[str]:
    """Return a sentence for each value that is wrong, or that contradicts another value.

    Args:
        given: arguments by name, without those that are None.
        own: DeepSpeed's own config, None without one.
    """
    if own is not None and (problems := _check_shape(own)):
        return problems
    found = []
    values: dict[str, Any] = {**DEFAULTS, **given}
    for name, key in KEYS.items():
        there = None if own is None else own.get_value(key)
        if there in (None, AUTO):
            continue
        if given.get(name, AUTO) not in (AUTO, there):
            found.append(f"{name}={given[name]!r} != {there!r}, {key} of DeepSpeed's config")
        values[name] = there
    if own is not None and own.get_value(KEYS["zero_stage"]) is None and "zero_stage" not in given:
        found.append(
            "DeepSpeed's config has no zero_optimization.stage: choose 0, 1, 2 or 3, or give zero_stage"
        )
    return [*found, *_check_values(values)]


def _check_shape(own: HfDeepSpeedConfig) -> list[str]:
    """Return a sentence for each section that is not an object, has no `type`, or is misspelt."""
    found = []
    for key in _SECTIONS:
        section = own.get_value(key)
        if section is not None and not isinstance(section, dict):
            found.append(f"{key} of DeepSpeed's config is {section!r}, not an object with keys of its own")
        elif section is not None and key in _TYPED_SECTIONS and not isinstance(section.get("type"), str):
            found.append(f"{key} of DeepSpeed's config has no type, the name of one")
    for key in own.config:
        if key not in _CHECKED_KEYS and (
            meant := difflib.get_close_matches(key, _CHECKED_KEYS, 1, _SIMILARITY)
        ):
            found.append(f"DeepSpeed knows no key {key!r}: {meant[0]!r} is meant")
    return found


def _check_values(values: Mapping[str, Any]) -> list[str]:
    found = []
    stage, steps, norm = (
        values[name] for name in ("zero_stage", "gradient_accumulation_steps", "gradient_clipping")
    )
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        found.append(f"zero_stage {stage!r} is none of 0, 1, 2, 3")
    if steps != AUTO and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        found.append(f'gradient_accumulation_steps {steps!r} is neither "auto" nor a whole number from 1')
    if norm != AUTO and (isinstance(norm, bool) or not isinstance(norm, (int, float)) or norm < 0):
        found.append(f'gradient_clipping {norm!r} is neither "auto" nor a number from 0')
    if values["zero3_save_16bit_model"] not in (False, True, AUTO):
        found.append(f"zero3_save_16bit_model {values['zero3_save_16bit_model']!r} is neither True nor False")
    for what, least in (("optimizer", 1), ("param", 3)):
        device, path = values[f"offload_{what}_device"], values[f"offload_{what}_nvme_path"]
        if device not in _DEVICES:
            found.append(f"offload_{what}_device {device!r} is none of {', '.join(_DEVICES)}")
        elif device != "none" and stage in (0, 1, 2, 3) and stage < (3 if device == "nvme" else least):
            needed = 3 if device == "nvme" else least
            found.append(
                f"offload_{what}_device {device!r} needs zero_stage {needed}{'' if needed == 3 else ' or more'}, "
                f"not {stage}"
            )
        if device == "nvme" and not path:
            found.append(f"offload_{what}_device 'nvme' needs offload_{what}_nvme_path, a folder")
        if path and device != "nvme":
            found.append(
                f"offload_{what}_nvme_path {path!r} is for offload_{what}_device 'nvme', not {device!r}"
            )
    return found
