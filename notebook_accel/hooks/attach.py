"""Hooks for all modules of a model that are to be brought to devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .align import AlignDevicesHook, align_hook, align_hooks, with_uncallable
from .base import add_hook_to_module, has_forward
from .prefetch import Prefetcher
from .tensors import Device, TiedMap, named_module_tensors
from .weights import PrefixedDataset

Weights = Mapping[str, torch.Tensor]


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedMap | None = None,
) -> None:
    """Give every module with weights, and without a hook, one that brings its inputs to the device.

    Args:
        module: with the modules inside.
        execution_device: where the weights are.
        skip_keys: keys of keyword arguments and of outputs that stay where they are.
        preload_module_classes: names of classes whose modules inside get none.
        tied_params_map: copies of shared weights, by address and device.
    """
    # the weights of what cannot be called are brought with a module around it
    is_offloaded = not has_forward(module) and any(
        tensor.is_meta for _, tensor in named_module_tensors(module)
    )
    if not hasattr(module, "_hf_hook") and len(module.state_dict()) > 0 and not is_offloaded:
        add_hook_to_module(
            module, AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
        )
    hook = align_hook(module)
    whole = hook is not None and hook.place_submodules
    if whole or type(module).__name__ in (preload_module_classes or ()):
        return
    for child in module.children():
        attach_execution_device_hook(
            child, execution_device, skip_keys, preload_module_classes, tied_params_map
        )


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Device | None = None,
    offload: bool = False,
    weights_map: Weights | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedMap | None = None,
    prefetcher: Prefetcher | None = None,
) -> None:
    """Give every module inside that has weights of its own an `AlignDevicesHook`.

    With `offload`, weights of a module that cannot be called, such as a `ParameterList`, come with the module around
    it, and stay where they are if there is none.

    Args:
        module: with the modules inside.
        execution_device: where they compute.
        offload: put their weights on the meta device between forwards.
        weights_map: has the weights by full name; without it they are kept on the CPU.
        offload_buffers: offload buffers too.
        module_name: the module's own name in the model.
        skip_keys: keys of keyword arguments and of outputs that stay where they are.
        preload_module_classes: names of classes whose modules get all weights inside at once.
        tied_params_map: copies of shared weights, by address and device.
        prefetcher: fetches weights before they are needed.
    """
    # torch's attention uses the weights of an inner layer without calling it
    whole = offload and (
        isinstance(module, nn.MultiheadAttention) or type(module).__name__ in (preload_module_classes or ())
    )
    parts = with_uncallable(module) if offload else [("", module)]
    has_own = any(next(named_module_tensors(part), None) is not None for _, part in parts)
    if whole or (has_own and (has_forward(module) or not offload)):
        prefix = f"{module_name}." if module_name else ""
        hook = AlignDevicesHook(
            execution_device,
            offload=offload,
            weights_map=None if weights_map is None else PrefixedDataset(weights_map, prefix),
            offload_buffers=offload_buffers,
            place_submodules=whole,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
            prefetcher=prefetcher,
        )
        add_hook_to_module(module, hook, append=True)
    if whole:
        return
    for name, child in module.named_children():
        attach_align_device_hook(
            child,
            execution_device,
            offload,
            weights_map,
            offload_buffers,
            f"{module_name}.{name}" if module_name else name,
            skip_keys,
            preload_module_classes,
            tied_params_map,
            prefetcher,
        )


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Device | Mapping[str, Device] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Weights | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedMap | None = None,
    prefetcher: Prefetcher | None = None,
) -> None:
    """Give the blocks of a model hooks, each for its device.

    Args:
        module: the model.
        execution_device: where all compute, or where each block does, by name.
        offload: whether weights are on the meta device between forwards, of all or of each block by name.
        weights_map: has the offloaded weights, by full name.
        offload_buffers: offload buffers too.
        module_name: the module's own name in the model.
        skip_keys: keys of keyword arguments and of outputs that stay where they are.
        preload_module_classes: names of classes whose modules get all weights inside at once.
        tied_params_map: copies of shared weights, by address and device.
        prefetcher: fetches weights before they are needed.
    """
    common: dict[str, Any] = {"skip_keys": skip_keys, "tied_params_map": tied_params_map}
    offloading: dict[str, Any] = {
        "weights_map": weights_map,
        "offload_buffers": offload_buffers,
        "preload_module_classes": preload_module_classes,
        "prefetcher": prefetcher,
    }
    if not isinstance(execution_device, Mapping) and not isinstance(offload, Mapping):
        if offload:
            attach_align_device_hook(
                module, execution_device, True, module_name=module_name, **offloading, **common
            )
            return
        hook = AlignDevicesHook(execution_device, io_same_device=True, place_submodules=True, **common)
        add_hook_to_module(module, hook, append=True)
        return
    places: dict[str, Any] = (
        dict(execution_device)
        if isinstance(execution_device, Mapping)
        else dict.fromkeys(offload, execution_device)  # type: ignore[arg-type]
    )
    are_offloaded = dict(offload) if isinstance(offload, Mapping) else dict.fromkeys(places, offload)
    for name, part in list(module.named_modules()):
        full = ".".join(filter(None, (module_name, name)))
        if full not in places and full:
            continue
        device, is_root = places.get(full), full == ""
        if are_offloaded.get(full, False):
            before = list(align_hooks(vars(part).get("_hf_hook")))
            attach_align_device_hook(part, device, True, module_name=full, **offloading, **common)
            added = [one for one in align_hooks(vars(part).get("_hf_hook")) if one not in before]
            if added and is_root:  # the new hook brings the weights of the root itself
                added[0].io_same_device = True
            elif not added and (is_root or not before):
                hook = AlignDevicesHook(device, io_same_device=is_root, skip_keys=skip_keys)
                add_hook_to_module(part, hook, append=True)
        else:
            is_placed = full in are_offloaded  # for the root, only the device may be given
            hook = AlignDevicesHook(
                device,
                io_same_device=is_root,
                offload_buffers=offload_buffers and is_placed,
                place_submodules=is_placed,
                **common,
            )
            add_hook_to_module(part, hook, append=True)
            if not is_placed:
                continue
        if device is not None:
            whole = preload_module_classes if are_offloaded.get(full, False) else None
            attach_execution_device_hook(part, device, preload_module_classes=whole, **common)
