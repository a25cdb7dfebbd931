"""Contexts and scalers of mixed precision for the runtime of this process."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .. import detect, devices, runtime
from ..handlers import AutocastKwargs
from ..precision import Precision
from ..state import DistributedType


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """Return a context in which operations run in the precision of the process's accelerator.

    Args:
        native_amp: False for a context that changes nothing. With True, torch chooses the format if the precision
            is `no`.
        autocast_kwargs: arguments of `torch.autocast`.
    """
    found = detect.ensure()
    if not native_amp:
        return nullcontext()
    if found.settings.mixed_precision == "no":
        options = {} if autocast_kwargs is None else autocast_kwargs.to_kwargs()
        return torch.autocast(found.device.type, **options)
    return Precision.context(found.settings.mixed_precision, found.device, autocast_kwargs)


def get_grad_scaler(distributed_type: DistributedType | None = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Return torch's loss scaler for the device of this process; one for sharded gradients where FSDP is the type.

    Args:
        distributed_type: of the run.
        kwargs: arguments of the scaler.
    """
    found = runtime.current()
    device = devices.best().name if found is None else found.device.type
    if distributed_type is not None and DistributedType(distributed_type) is DistributedType.FSDP:
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler(device, **kwargs)
    return torch.amp.GradScaler(device, **kwargs)
