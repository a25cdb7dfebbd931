"""Builds models without memory for their weights, or directly on a device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as registration
from torch.utils.weak import WeakTensorKeyDictionary

from .. import environ
from ..hooks.offloaded_tensor import like_parameter
from ..hooks.tensors import Device, as_device


@contextlib.contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Within the block, modules are built with their parameters on the meta device, which has no values.

    Modules that share a parameter still share it.

    Args:
        include_buffers: True puts buffers there too; a model that reads their values while it is built then fails.
            The default is what ACCELERATE_INIT_INCLUDE_BUFFERS says, else False.
    """
    if include_buffers is None:
        include_buffers = environ.flag("ACCELERATE_INIT_INCLUDE_BUFFERS")
    with init_on_device(torch.device("meta"), include_buffers=include_buffers):
        yield


@contextlib.contextmanager
def init_on_device(device: Device, include_buffers: bool | None = None) -> Iterator[None]:
    """Within the block, modules are built with their parameters on this device.

    Args:
        device: any of torch's, `meta` too.
        include_buffers: True builds all tensors there. The default is what ACCELERATE_INIT_INCLUDE_BUFFERS says, else
            False.
    """
    target = as_device(device)
    if include_buffers is None:
        include_buffers = environ.flag("ACCELERATE_INIT_INCLUDE_BUFFERS")
    built = target if include_buffers else contextlib.nullcontext()
    with built, redirect_registration(target, include_buffers=include_buffers):
        yield


@contextlib.contextmanager
def redirect_registration(device: torch.device, *, include_buffers: bool) -> Iterator[None]:
    """Within the block, tensors move to the device when they become part of a module.

    Modules that share a tensor still share it.

    Args:
        device: where they go.
        include_buffers: buffers too, not only parameters.
    """
    known: Any = WeakTensorKeyDictionary()

    def move(_module: nn.Module, _name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None or tensor.device == device:
            return None  # leaves it as it is
        if tensor not in known:
            known[tensor] = like_parameter(tensor, tensor.detach().to(device))
        found: torch.Tensor = known[tensor]
        return found

    hooks: Any = registration
    register: list[Callable[..., Any]] = [hooks.register_module_parameter_registration_hook]
    if include_buffers:
        register.append(hooks.register_module_buffer_registration_hook)
    handles: list[Any] = []
    try:
        for one in register:
            handles.append(one(move))
        yield
    finally:
        for handle in handles:
            handle.remove()
