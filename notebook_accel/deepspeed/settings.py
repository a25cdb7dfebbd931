"""The arguments of DeepSpeedPlugin that DeepSpeed's config has too: their keys, variables and checks."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
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
_LEGAL: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "gradient_accumulation_steps": (
        lambda value: value == AUTO or _is_number(value, int, 1),
        'is neither "auto" nor a whole number from 1',
    ),
    "gradient_clipping": (
        lambda value: value == AUTO or _is_number(value, (int, float), 0),
        'is neither "auto" nor a number from 0',
    ),
    "zero_stage": (lambda value: value in range(4) and not isinstance(value, bool), "is none of 0, 1, 2, 3"),
    **{
        f"offload_{what}_device": (lambda value: value in _DEVICES, f"is none of {', '.join(_DEVICES)}")
        for what in ("optimizer", "param")
    },
    **{
        f"offload_{what}_nvme_path": (
            lambda value: isinstance(value, str | os.PathLike),
            "is no path of a folder",
        )
        for what in ("optimizer", "param")
    },
    "zero3_save_16bit_model": (lambda value: value in (False, True, AUTO), "is neither True nor False"),
    "zero3_init_flag": (lambda value: value in (False, True), "is neither True nor False"),
    "is_train_batch_min": (lambda value: value in (False, True), "is neither True nor False"),
    "transformer_moe_cls_names": (
        lambda value: isinstance(value, str),
        "is no text: separate names by commas",
    ),
    "enable_msamp": (
        lambda value: not value,
        "cannot be: MS-AMP is not supported, use mixed_precision='bf16'",
    ),
    "hf_ds_config": (
        lambda value: isinstance(getattr(value, "config", None), dict) and hasattr(value, "get_value"),
        "is no HfDeepSpeedConfig",
    ),
}
"""Which values an attribute of the plugin can have whatever the others have, and what is said of another."""
SECTIONS: Final = (
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
    for key in SECTIONS:
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


def check_value(name: str, value: Any) -> list[str]:
    """Return a sentence where an attribute of the plugin cannot have a value; any may be None.

    Args:
        name: of the attribute.
        value: its value.
    """
    is_legal, reason = _LEGAL.get(name, (lambda value: True, ""))
    return [] if value is None or is_legal(value) else [f"{name} {value!r} {reason}"]


def _check_values(values: Mapping[str, Any]) -> list[str]:
    found = [problem for name, value in values.items() for problem in check_value(name, value)]
    stage = values["zero_stage"]
    for what, least in (("optimizer", 1), ("param", 3)):
        device, path = values[f"offload_{what}_device"], values[f"offload_{what}_nvme_path"]
        if device in ("cpu", "nvme") and stage in (0, 1, 2, 3) and stage < (3 if device == "nvme" else least):
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


def _is_number(value: Any, kinds: Any, least: int) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool) and bool(value >= least)
