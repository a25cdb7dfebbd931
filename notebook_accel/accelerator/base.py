"""What the parts of the accelerator share."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from ..compilation import TorchDynamoPlugin
from ..fp8 import AORecipeKwargs
from ..gradient_state import GradientState
from ..handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)
from ..optimizer import AcceleratedOptimizer
from ..precision import Precision
from ..runtime import Runtime
from ..scheduler import AcceleratedScheduler
from ..state import AcceleratorState
from ..state_views import StateResetError, describe_reset
from ..strategies.base import Strategy


class Shared:
    """The attributes of an accelerator; its methods come in one class for each thing it does.

    Attributes:
        state: what the process is to the run.
        gradient_state: where gradient accumulation stands.
        device_placement: True moves models and batches to the device.
        dataloader_config: how loaders are prepared.
        step_scheduler_with_optimizer: False steps schedulers at every call.
        rng_types: generators that every epoch starts with as rank 0 has them.
        profile_handler: what `profile` records if it is not told.
        scaler_handler: what made the loss scaler.
        init_handler: what opened the process group.
        flag_tensor: 1 where `set_trigger` was called and `check_trigger` not yet; None before the first call.
    """

    state: AcceleratorState
    gradient_state: GradientState
    device_placement: bool
    dataloader_config: DataLoaderConfiguration
    step_scheduler_with_optimizer: bool
    rng_types: list[str]
    profile_handler: ProfileKwargs | None
    scaler_handler: GradScalerKwargs | None
    init_handler: InitProcessGroupKwargs | None
    flag_tensor: torch.Tensor | None
    _made_at: tuple[str, int]
    _runtime: Runtime
    _strategy: Strategy
    _precision: Precision
    _dynamo: TorchDynamoPlugin
    _ddp_handler: DistributedDataParallelKwargs | None
    _autocast_handler: AutocastKwargs | None
    _recipe: AORecipeKwargs | None
    _step: int
    _counts: dict[frozenset[int] | None, int]
    _counted: frozenset[int] | None
    _models: list[torch.nn.Module]
    _optimizers: list[AcceleratedOptimizer]
    _schedulers: list[AcceleratedScheduler]
    _dataloaders: list[DataLoader[Any]]

    def _check_state(self) -> None:
        """StateResetError after `AcceleratorState._reset_state`: what it removes is what prepares."""
        if not self._runtime.accelerated:
            raise StateResetError(describe_reset("AcceleratorState"))
