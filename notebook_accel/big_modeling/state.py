"""State dicts of models whose weights are offloaded between forwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..checkpointing.models import is_extra_state
from ..compilation import plain_name
from ..hooks.align import AlignDevicesHook, align_hook, align_module_device
from ..hooks.tensors import Device, as_device


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """Return all weights of a model on the CPU, also those that its hooks bring only for the forward.

    Weights that are on the disk take memory in the result.

    Args:
        model: with hooks or without.

    Returns:
        The tensors by name, see `plain_name`, and what modules return from `get_extra_state`.

    Raises:
        ValueError: a weight has no values anywhere.
    """
    state = model.state_dict()
    found: dict[str, Any] = {
        name: value.detach().to("cpu") if isinstance(value, torch.Tensor) else value
        for name, value in state.items()
        if is_extra_state(name) and not getattr(value, "is_meta", False)
    }
    known: dict[int, torch.Tensor] = {}
    for path, part in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        hook = align_hook(part)
        before = {key: id(tensor) for key, tensor in _state_with(part, hook).items()}
        with align_module_device(part, "cpu"):
            for key, tensor in _state_with(part, hook).items():
                if tensor.is_meta:
                    continue
                if before[key] not in known:  # copy what the hook takes away again; it may be pages of a file
                    known[before[key]] = tensor.detach().to("cpu", copy=hook is not None)
                found.setdefault(prefix + key, known[before[key]])
    if lost := [name for name in state if name not in found]:
        raise ValueError(f"{', '.join(map(repr, lost))} have no values: they are on the meta device")
    return {plain_name(name): found[name] for name in state}


def _state_with(module: nn.Module, hook: AlignDevicesHook | None) -> dict[str, torch.Tensor]:
    """Return the module's own state, with what its hook brings for modules inside."""
    parts = [("", module)] if hook is None else hook.parts_of(module)
    return {
        f"{path}.{key}" if path else key: tensor
        for path, part in parts
        for key, tensor in collect_own_state(part).items()
    }


def collect_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's state dict, without what modules return from `get_extra_state`.

    Hooks offload none of the latter, which may be no tensors.

    Args:
        model: with the tensors.
    """
    return {name: value for name, value in model.state_dict().items() if not is_extra_state(name)}


def collect_own_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers of a module, without those of modules inside.

    Args:
        module: the module.
    """
    state = {name: item for name, item in module._parameters.items() if item is not None}
    transient = module._non_persistent_buffers_set
    return state | {
        name: item for name, item in module._buffers.items() if item is not None and name not in transient
    }


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: dict[str, str | torch.Tensor],
    device_to_put_offload: Device = "cpu",
) -> dict[str, str | torch.Tensor]:
    """Put a module's own weights into a state dict that has other values for their names.

    Args:
        module: its weights may be offloaded.
        module_name: the full name of one of its tensors.
        state_dict: gets values for names below the module's; it is changed in place.
        device_to_put_offload: where the values are put.

    Returns:
        The same state dict.
    """
    root = module_name.rpartition(".")[0]
    prefix = f"{root}." if root else ""
    with align_module_device(module, device_to_put_offload):
        state: Mapping[str, Any] = collect_own_state(module)
        for name, tensor in state.items():
            if prefix + name in state_dict:
                state_dict[prefix + name] = tensor.detach().to(as_device(device_to_put_offload))
    return state_dict
