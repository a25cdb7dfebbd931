"""Replaces every "auto" in DeepSpeed's config by a value of the accelerator, model, optimizer or loaders."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from .config import AUTO, HfDeepSpeedConfig, leaves
from .dummies import DummyOptim, DummyScheduler
from .plugin import DeepSpeedPlugin

_MICRO: Final = "train_micro_batch_size_per_gpu"
_BY_WIDTH: Final[Mapping[str, Callable[[int], int]]] = {
    "zero_optimization.reduce_bucket_size": lambda width: width * width,
    "zero_optimization.stage3_prefetch_bucket_size": lambda width: int(0.9 * width * width),
    "zero_optimization.stage3_param_persistence_threshold": lambda width: 10 * width,
}
"""What DeepSpeed's documentation advises for a Transformer with layers of this width."""
_HINTS: Final = {
    _MICRO: "prepare a loader with a batch_size in the same call, or",
    "scheduler.params.total_num_steps": "give total_num_steps to DummyScheduler, or",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The values that replace "auto".

    Attributes:
        mixed_precision: `no`, `fp16` or `bf16`.
        num_steps: batches per optimizer step.
        world_size: number of processes.
        batch_size: samples of one process per batch; None where no loader has one.
        step_shares: steps of a schedule in one optimizer step.
        on_cpu: whether the processes train on CPUs.
        model: the user's model; its `config`, if it has one, says how wide its layers are.
        optimizer: the user's optimizer or a `DummyOptim`; None without one.
        scheduler: the `DummyScheduler`; None without one.
    """

    mixed_precision: str
    num_steps: int
    world_size: int
    batch_size: int | None
    step_shares: int
    on_cpu: bool
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | DummyOptim | None = None
    scheduler: DummyScheduler | None = None


def fill_config(plugin: DeepSpeedPlugin, facts: Facts) -> dict[str, Any]:
    """Return a copy of the plugin's config for one model, without "auto".

    Args:
        plugin: has DeepSpeed's config; it does not change.
        facts: the values that replace "auto".

    Raises:
        ValueError: keys are still "auto", or the config contradicts the optimizer, the scheduler or the batches. One
            message names all problems.
    """
    config = HfDeepSpeedConfig(copy.deepcopy(plugin.deepspeed_config))
    problems = _find_contradictions(config, facts)
    for key, value in _values(facts).items():
        if config.get_value(key) == AUTO:
            config.set_value(key, value)
    for key in _BY_WIDTH:
        if config.get_value(key) == AUTO:
            config.del_config_sub_tree(key)  # then DeepSpeed uses its default
    _fill_batches(config, facts, problems)
    _set_optimizer_options(config, facts)
    for key, value in leaves(config.config):
        if value == AUTO or (isinstance(value, list) and AUTO in value):
            hint = _HINTS.get(key, "")
            problems.append(
                f'{key} is "auto" and nothing says what it is: {hint or ""} give it a value'.replace(
                    ":  ", ": "
                )
            )
    if problems:
        raise ValueError("\n- ".join(["DeepSpeed cannot train with this config:", *problems]))
    return config.config


def _values(facts: Facts) -> dict[str, Any]:
    """Return the value that replaces an "auto", by key."""
    values: dict[str, Any] = {
        "gradient_accumulation_steps": facts.num_steps,
        "gradient_clipping": 0.0,  # the loop itself clips, by clip_grad_norm_
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
        "zero_optimization.offload_optimizer.device": "none",
        "zero_optimization.offload_param.device": "none",
        "fp16.enabled": facts.mixed_precision == "fp16",
        "bf16.enabled": facts.mixed_precision == "bf16",
    }
    if facts.batch_size is not None:
        values[_MICRO] = facts.batch_size
    width = _width(facts.model)
    if width is not None:
        values |= {key: by_width(width) for key, by_width in _BY_WIDTH.items()}
    optimizer, scheduler = facts.optimizer, facts.scheduler
    rate = None
    if isinstance(optimizer, DummyOptim):
        rate = optimizer.lr
        own = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay, **optimizer.kwargs}
        values |= {f"optimizer.params.{name}": value for name, value in own.items()}
    elif optimizer is not None:
        rate = optimizer.param_groups[0]["lr"]
    if scheduler is not None:
        own = {"warmup_min_lr": 0.0, **({} if rate is None else {"warmup_max_lr": rate})}
        # a schedule counts the steps of one process alone; DeepSpeed steps it once per optimizer step
        own["warmup_num_steps"] = max(1, math.ceil(scheduler.warmup_num_steps / facts.step_shares))
        if scheduler.total_num_steps is not None:
            own["total_num_steps"] = math.ceil(scheduler.total_num_steps / facts.step_shares)
        values |= {f"scheduler.params.{name}": value for name, value in (own | scheduler.kwargs).items()}
    return values


def _width(model: torch.nn.Module) -> int | None:
    own = getattr(model, "config", None)
    text = getattr(own, "text_config", None)
    for source in (own, text):
        found = getattr(source, "hidden_size", None) or max(getattr(source, "hidden_sizes", None) or [0])
        if isinstance(found, int) and found:
            return found
    return None


def _find_contradictions(config: HfDeepSpeedConfig, facts: Facts) -> list[str]:
    found = []
    optimizer, scheduler = facts.optimizer, facts.scheduler
    has_optimizer, has_scheduler = (
        isinstance(config.get_value(name), dict) for name in ("optimizer", "scheduler")
    )
    if has_optimizer and optimizer is not None and not isinstance(optimizer, DummyOptim):
        found.append(
            f"the config has an optimizer, {config.get_value('optimizer.type')}, and {type(optimizer).__name__} was "
            "prepared: prepare a DummyOptim, or remove it from the config"
        )
    if isinstance(optimizer, DummyOptim) and not has_optimizer:
        found.append(
            "a DummyOptim was prepared, and the config has no optimizer: add one, or prepare one of torch"
        )
    if scheduler is not None and not has_scheduler and scheduler.lr_scheduler_callable is None:
        found.append(
            "a DummyScheduler was prepared, and the config has no scheduler: add one, or give lr_scheduler_callable"
        )
    if has_scheduler and scheduler is None and optimizer is not None:
        found.append(
            f"the config has a scheduler, {config.get_value('scheduler.type')}, and no DummyScheduler was prepared: "
            "prepare one, or remove it from the config"
        )
    if has_scheduler and scheduler is not None and scheduler.lr_scheduler_callable is not None:
        found.append("the config has a scheduler, and DummyScheduler an lr_scheduler_callable: leave one out")
    return found


def _fill_batches(config: HfDeepSpeedConfig, facts: Facts, problems: list[str]) -> None:
    """Set the sizes of batches that are missing; note a problem where they contradict each other.

    DeepSpeed requires the sizes, but only reports them.
    """
    if config.get_value("gradient_accumulation_steps") is None:
        config.set_value("gradient_accumulation_steps", facts.num_steps)
    steps, total, micro = (
        config.get_value(key) for key in ("gradient_accumulation_steps", "train_batch_size", _MICRO)
    )
    rest = steps * facts.world_size
    if micro in (None, AUTO) and isinstance(total, int) and total % rest == 0:
        config.set_value(_MICRO, micro := total // rest)
    elif micro is None:
        config.set_value(_MICRO, micro := facts.batch_size or 1)
    if not isinstance(micro, int):
        config.del_config_sub_tree("train_batch_size")  # it follows from the size that stays unknown
    elif total in (None, AUTO):
        config.set_value("train_batch_size", micro * rest)
    elif total != micro * rest:
        problems.append(
            f"train_batch_size {total} != {_MICRO} {micro} x gradient_accumulation_steps {steps} x processes "
            f"{facts.world_size}"
        )


def _set_optimizer_options(config: HfDeepSpeedConfig, facts: Facts) -> None:
    params = config.get_value("optimizer.params") or {}
    if facts.on_cpu and str(config.get_value("optimizer.type")).lower() in ("adam", "adamw"):
        # DeepSpeed would compile its own first
        config.set_value("optimizer.params", {"torch_adam": True, **params})
    if isinstance(facts.optimizer, torch.optim.Optimizer):
        config.config.setdefault("zero_allow_untested_optimizer", True)
        config.config.setdefault("zero_force_ds_cpu_optimizer", False)
