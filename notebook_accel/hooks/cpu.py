"""Models that are on their device for their forward only, one after the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .. import devices, runtime, topology
from ..nested import send_to_device
from .base import ModelHook, remove_hook_from_module
from .tensors import Device, as_device


class CpuOffload(ModelHook):
    """Keeps a model on the CPU until its first forward, then on its device until `UserCpuOffloadHook.offload`.

    Args:
        execution_device: where the model computes; by default the device of this process.
        prev_module_hook: of the model that computes before this one; that one leaves the device first.
    """

    def __init__(
        self, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device = _own_device() if execution_device is None else as_device(execution_device)

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to("cpu")

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.prev_module_hook is not None:
            self.prev_module_hook.offload()
        module.to(self.execution_device)
        sent: tuple[Any, ...] = send_to_device(args, self.execution_device)
        return sent, send_to_device(kwargs, self.execution_device)


def _own_device() -> torch.device:
    """Return the device that an `Accelerator` of this process has, or would have."""
    current = runtime.current()
    if current is not None:
        return current.device
    return devices.device_for(devices.best(), topology.from_environ().local_rank)


class UserCpuOffloadHook:
    """What the caller has of a `CpuOffload`: the model goes to the CPU, or loses the hook."""

    def __init__(self, model: nn.Module, hook: CpuOffload) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Bring the model to the CPU."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Take the hook off; the model stays where it is."""
        remove_hook_from_module(self.model)
