"""Keeps all weights of a model on the CPU or the disk until its forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from .. import devices
from ..checkpointing.folder import PathLike
from ..checkpointing.models import join_names
from ..hooks import (
    AlignDevicesHook,
    CpuOffload,
    UserCpuOffloadHook,
    add_hook_to_module,
    attach_align_device_hook,
    tensors,
)
from ..hooks.align import align_hooks, remove_offload_hooks
from ..hooks.prefetch import Prefetcher
from ..hooks.tensors import Device
from . import offload
from .device_map import check_buffers
from .offload import Index, OffloadedWeightsLoader
from .state import collect_state


def cpu_offload(
    model: nn.Module,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep a model's weights on the CPU, in place; those of each module come to a device for its forward.

    Args:
        model: the model.
        execution_device: where it computes, by default where its first parameter is.
        offload_buffers: offload buffers too.
        state_dict: the weights, by default the model's own.
        preload_module_classes: names of classes whose modules get all weights inside them at once, because they use
            these without calling the modules inside.

    Returns:
        The model.

    Raises:
        ValueError: a weight has no values, or the model has no parameters and no `execution_device` is given.
    """
    device = _device_of(model) if execution_device is None else tensors.as_device(execution_device)
    check_buffers(model)
    _check_has_values(model, state_dict, offload_buffers)
    if state_dict is None:
        state_dict = {name: tensor.to("cpu") for name, tensor in collect_state(model).items()}
    return _offload(model, device, state_dict, offload_buffers, preload_module_classes)


def disk_offload(
    model: nn.Module,
    offload_dir: PathLike,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Write a model's weights to a folder, in place; those of each module come to a device for its forward.

    Args:
        model: the model.
        offload_dir: gets the weights. If some are on the meta device it has their values from an earlier call.
        execution_device: where it computes, by default where its first parameter is.
        offload_buffers: offload buffers too.
        preload_module_classes: see `cpu_offload`.

    Returns:
        The model.

    Raises:
        ValueError: as in `cpu_offload`.
        CheckpointError: the folder has no room or cannot be read.
    """
    device = _device_of(model) if execution_device is None else tensors.as_device(execution_device)
    check_buffers(model)
    state = collect_state(model)
    if any(tensor.is_meta for tensor in state.values()):  # the values are in the folder, or nowhere
        _check_indexed(state, offload.read_index(offload_dir), offload_dir)
    if present := {name: tensor for name, tensor in state.items() if not tensor.is_meta}:
        offload.offload_state_dict(offload_dir, present)
    return _offload(
        model,
        device,
        OffloadedWeightsLoader(save_folder=offload_dir),
        offload_buffers,
        preload_module_classes,
    )


def _device_of(model: nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    if first is None:
        raise ValueError(f"{type(model).__name__} has no parameters: give an execution_device")
    if first.is_meta:
        return devices.device_for(devices.best(), 0)
    return first.device


def _check_has_values(
    model: nn.Module, given: Mapping[str, torch.Tensor] | None, offload_buffers: bool
) -> None:
    state = collect_state(model)
    if given is None:
        lost = [name for name, tensor in state.items() if tensor.is_meta]
    else:
        buffers = set() if offload_buffers else {name for name, _ in model.named_buffers()}
        lost = sorted(set(state) - buffers - set(given))
    if lost:
        where = "they are on the meta device" if given is None else "the state_dict has none"
        raise ValueError(
            f"no values for {join_names(lost)}, {where}: give a state_dict with all weights; from a model that is "
            "offloaded already remove_hook_from_submodules takes the hooks off first"
        )


def _check_indexed(state: Mapping[str, torch.Tensor], index: Index, where: PathLike) -> None:
    if lost := [name for name, tensor in state.items() if tensor.is_meta and name not in index]:
        raise ValueError(
            f"tensors on the meta device have no values, and {where} has none: {', '.join(lost)}"
        )


def _offload(
    model: nn.Module,
    device: torch.device,
    weights: Mapping[str, torch.Tensor],
    offload_buffers: bool,
    preload_module_classes: Sequence[str] | None,
) -> nn.Module:
    remove_offload_hooks(model)
    prefetcher = Prefetcher()
    before = list(align_hooks(vars(model).get("_hf_hook")))
    attach_align_device_hook(
        model,
        execution_device=device,
        offload=True,
        weights_map=weights,
        offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
        prefetcher=prefetcher,
    )
    added = [hook for hook in align_hooks(vars(model).get("_hf_hook")) if hook not in before]
    if not added:  # the model has no weights of its own
        added = [AlignDevicesHook()]
        add_hook_to_module(model, added[0], append=True)
    added[0].io_same_device, added[0].leads = True, prefetcher
    return model


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: Device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep a model on the CPU until its forward, then on a device until its hook's `offload`.

    Args:
        model: goes to the CPU.
        execution_device: where it computes, by default the device of this process.
        prev_module_hook: of the model before it in a pipeline, which leaves the device when this one comes.

    Returns:
        The model and its hook.
    """
    hook = CpuOffload(execution_device=execution_device, prev_module_hook=prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)
