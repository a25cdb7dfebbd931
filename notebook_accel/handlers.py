"""Options passed through to torch: one dataclass for each thing that can be customised."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any

from .choices import Choice


@dataclass
class KwargsHandler:
    """Base of all handlers; a field that keeps its default is left to torch."""

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of all fields."""
        return {item.name: copy.deepcopy(getattr(self, item.name)) for item in fields(self)}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        defaults = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != defaults[name]}


@dataclass
class AutocastKwargs(KwargsHandler):
    """Arguments of `torch.autocast`."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Arguments of `torch.amp.GradScaler`."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Arguments of `torch.distributed.init_process_group`; the default backend stands for the device's own."""

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None


class DDPCommunicationHookType(Choice):
    """How DistributedDataParallel compresses gradients before it sends them."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Arguments of `DistributedDataParallel`, and the hook that compresses its messages.

    Attributes:
        comm_hook: how gradients are compressed.
        comm_wrapper: cast to this before a PowerSGD hook; FP16, BF16 or NO.
        comm_state_option: arguments of `PowerSGDState`.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def to_dict(
        self, ignore_keys: Sequence[str] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """Return a copy of the fields that torch takes."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: Any) -> None:
        """Give the wrapped model the hook that compresses its messages."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        kind = DDPCommunicationHookType
        hooks = {
            kind.FP16: default_hooks.fp16_compress_hook,
            kind.BF16: default_hooks.bf16_compress_hook,
            kind.POWER_SGD: powerSGD_hook.powerSGD_hook,
            kind.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
        }
        wrappers = {
            kind.FP16: default_hooks.fp16_compress_wrapper,
            kind.BF16: default_hooks.bf16_compress_wrapper,
        }
        chosen = kind(self.comm_hook)
        if chosen is kind.NO:
            return
        hook: Any = hooks[chosen]
        wrapper: Any = wrappers.get(kind(self.comm_wrapper))
        state = None
        if chosen in (kind.POWER_SGD, kind.BATCHED_POWER_SGD):
            state = powerSGD_hook.PowerSGDState(None, **self.comm_state_option)
        model.register_comm_hook(state=state, hook=hook if wrapper is None else wrapper(hook))


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How gradients accumulate.

    Attributes:
        num_steps: batches per optimizer step.
        adjust_scheduler: without effect, as in Accelerate: schedules step with the optimizer in either case.
        sync_with_dataloader: make the last batch of a loader a step.
        sync_each_batch: reduce gradients on accumulated batches too, which saves memory and costs time.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
