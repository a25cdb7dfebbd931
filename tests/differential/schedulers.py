"""Cases: how often a schedule steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import lr_scheduler

from tests.differential.parts import linear, regression, sgd, train

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + count)),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=7),
    "OneCycleLR, long": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=40),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=5),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, 0.1, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[2],
    ),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "by default": {},
    "split_batches": {"split": True},
    "at every call": {"step_scheduler_with_optimizer": False},
    "2 steps": {"num_steps": 2},
    "2 steps, unadjusted": {"num_steps": 2, "adjust_scheduler": False},
}


def scheduled(library: Any, schedule: str, setting: str) -> Any:
    options = dict(SETTINGS[setting])
    loading = library.utils.DataLoaderConfiguration(split_batches=options.pop("split", False))
    with_optimizer = options.pop("step_scheduler_with_optimizer", True)
    plugin = library.utils.GradientAccumulationPlugin(**({"num_steps": 1} | options))
    accelerator = library.Accelerator(
        cpu=True,
        dataloader_config=loading,
        step_scheduler_with_optimizer=with_optimizer,
        gradient_accumulation_plugin=plugin,
    )
    model = linear()
    optimizer = sgd(model)
    prepared = accelerator.prepare(model, optimizer, regression(12, 2), SCHEDULES[schedule](optimizer))
    seen = train(accelerator, *prepared, epochs=1)
    state = prepared[3].state_dict()
    return seen["rate"], {name: state[name] for name in ("last_epoch", "_step_count") if name in state}


CASES: dict[str, Callable[[Any], Any]] = {
    f"{schedule}, {setting}": partial(scheduled, schedule=schedule, setting=setting)
    for schedule in SCHEDULES
    for setting in SETTINGS
}
