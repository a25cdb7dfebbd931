"""Puts the parts of a model on several devices; those of the CPU and the disk come to a device for their forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from ..checkpointing import shards
from ..checkpointing.folder import PathLike
from ..hooks import attach_align_device_hook_on_blocks, tensors
from ..hooks.align import align_hooks, remove_offload_hooks, with_uncallable
from ..hooks.base import has_forward
from ..hooks.prefetch import Prefetcher
from ..hooks.tensors import Device
from ..hooks.weights import get_lasting
from . import load, offload, ties
from .device_map import DeviceMap, check_buffers, check_device_map, check_devices_exist, infer_auto_device_map
from .limits import Limits, get_balanced_memory
from .moves import guard_moves
from .offload import Index, OffloadedWeightsLoader
from .placing import list_slots
from .state import collect_state

STRATEGIES: Final = ("auto", "balanced", "balanced_low_0", "sequential")
"""Words that stand for a device map of `infer_auto_device_map`."""


def dispatch_model(
    model: nn.Module,
    device_map: DeviceMap,
    main_device: Device | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: PathLike | None = None,
    offload_index: Index | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Put each part of a model on its device, in place, so that a forward passes from one device to the next.

    Args:
        model: with values, except for weights that are in the `state_dict` or on the disk.
        device_map: a device for each part by name: a number of a GPU, a device of torch, `cpu` or `disk`.
        main_device: where parts of `cpu` and `disk` compute, by default the first other device of the map.
        state_dict: weights of parts that stay on the CPU.
        offload_dir: has the weights of `disk`. It gets those of them that the model has values of.
        offload_index: where the weights of `disk` are, instead of the folder's index.
        offload_buffers: offload buffers too.
        skip_keys: keys of keyword arguments and of outputs that stay where they are.
        preload_module_classes: see `cpu_offload`.
        force_hooks: add hooks even if everything is on one device.

    Returns:
        The model.

    Raises:
        ValueError: the map leaves a tensor without a device, or weights of `disk` are nowhere.
        CheckpointError: the folder has no room, or a file of the index is damaged.
    """
    check_device_map(model, device_map)
    check_devices_exist(device_map)
    check_buffers(model)
    places = set(device_map.values())
    if len(places) == 1 and "disk" not in places and not force_hooks:
        device = places.pop()
        if not any(slot.tensor.is_meta for slot in list_slots(model)):
            remove_offload_hooks(model)
        model.to(tensors.as_device(device))
        _note(model, device_map)
        return model
    main = _main_device(device_map) if main_device is None else tensors.as_device(main_device)
    tied = ties.find_tied_parameters(model)
    ties.check_tied_parameters_on_same_device(tied, device_map)
    offloaded_on = {"disk"} if main.type in ("cpu", "mps") else {"disk", "cpu"}
    offloaded = {name: device in offloaded_on for name, device in device_map.items()}
    weights = _collect_weights(
        model, device_map, offloaded, state_dict, offload_dir, offload_index, offload_buffers
    )
    remove_offload_hooks(model)
    _place_loose_tensors(model, offloaded, weights or {}, main)
    execution: dict[str, Device] = {
        name: main if offloaded[name] else tensors.as_device(device) for name, device in device_map.items()
    }
    execution.setdefault("", main)
    prefetcher = Prefetcher()
    attach_align_device_hook_on_blocks(
        model,
        execution_device=execution,
        offload=offloaded,
        offload_buffers=offload_buffers,
        weights_map=weights,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        tied_params_map={},
        prefetcher=prefetcher,
    )
    if any(offloaded.values()):
        lead = next(hook for hook in align_hooks(vars(model)["_hf_hook"]) if hook.io_same_device)
        lead.leads = prefetcher
    ties.retie_parameters(model, _group_by_device(tied, device_map))
    guard_moves(model)
    _note(model, device_map)
    return model


def _place_loose_tensors(
    model: nn.Module, offloaded: Mapping[str, bool], weights: Mapping[str, torch.Tensor], main: torch.device
) -> None:
    """Bring tensors that the map names by themselves to where their module computes.

    Hooks bring the tensors of whole modules. A module that cannot be called, such as a `ParameterList`, has no hook.
    Its tensors are treated as if the map named them.
    """
    alone = {name for name, is_offloaded in offloaded.items() if is_offloaded}
    modules = dict(model.named_modules())
    for entry in alone & modules.keys():
        if not has_forward(modules[entry]):
            alone |= {
                f"{path}.{key}" if path else key
                for path, part in with_uncallable(modules[entry], entry)
                for key, _ in tensors.named_module_tensors(part)
            }
    for name, tensor in list(tensors.named_module_tensors(model, recurse=True)):
        if name in alone:
            value = get_lasting(weights, name) if tensor.is_meta else None
            tensors.set_module_tensor_to_device(model, name, main, value=value)


def _main_device(device_map: DeviceMap) -> torch.device:
    first = next((device for device in device_map.values() if device not in ("cpu", "disk")), "cpu")
    return tensors.as_device(first)


def _group_by_device(tied: Sequence[Sequence[str]], device_map: DeviceMap) -> list[list[str]]:
    """Return the names of shared weights that are on one device."""
    groups: list[list[str]] = []
    for group in tied:
        by_device: dict[Any, list[str]] = {}
        for name in group:
            by_device.setdefault(ties.find_device(name, device_map), []).append(name)
        groups += [names for names in by_device.values() if len(names) > 1]
    return groups


def _collect_weights(
    model: nn.Module,
    device_map: DeviceMap,
    offloaded: Mapping[str, bool],
    state_dict: Mapping[str, torch.Tensor] | None,
    offload_dir: PathLike | None,
    offload_index: Index | None,
    offload_buffers: bool,
) -> Mapping[str, torch.Tensor] | None:
    """Return a mapping with the weights of all offloaded parts, from memory and from the disk."""
    state = collect_state(model)
    if not any(offloaded.values()) and not any(tensor.is_meta for tensor in state.values()):
        return None
    index: dict[str, Mapping[str, Any]] = dict(offload_index or {})
    if offload_index is None and offload_dir is not None:
        index = dict(offload.read_index(offload_dir)) if _has_index(offload_dir) else {}
    in_memory = dict(state_dict or {})
    missing: dict[str, torch.Tensor] = {}
    buffers = {name for name, _ in model.named_buffers()}
    for name, tensor in state.items():
        device = ties.find_device(name, device_map)
        is_offloaded = device in ("cpu", "disk") and offloaded[_entry(name, device_map)]
        if not is_offloaded or (name in buffers and not offload_buffers) or name in in_memory:
            continue
        if device == "cpu" and not tensor.is_meta:
            in_memory[name] = tensor.to("cpu")
        elif not tensor.is_meta:
            missing[name] = tensor  # newer than what the disk may have
        elif name not in index:
            raise ValueError(
                f"{name!r} is on the meta device and has no values: load the weights first, or give a state_dict, an "
                "offload_index or an offload_dir that has them"
            )
    for name, tensor in state.items():
        device = ties.find_device(name, device_map)
        if tensor.is_meta and str(device) != "meta" and not offloaded[_entry(name, device_map)]:
            raise ValueError(
                f"{name!r} is on the meta device and has no values for {device}: load the weights first"
            )
    if missing:
        if offload_dir is None:
            raise ValueError(
                f"the device map puts {', '.join(list(missing)[:3])} on disk: give an offload_dir to write them to"
            )
        offload.offload_state_dict(offload_dir, missing)
        index |= {name: offload.read_index(offload_dir)[name] for name in missing}
    return OffloadedWeightsLoader(state_dict=in_memory, save_folder=offload_dir, index=index)


def _entry(name: str, device_map: DeviceMap) -> str:
    while name not in device_map:
        name = name.rpartition(".")[0]
    return name


def _has_index(folder: PathLike) -> bool:
    return (Path(folder) / offload.INDEX).is_file()


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: PathLike,
    device_map: str | DeviceMap | None = None,
    max_memory: Limits | None = None,
    no_split_module_classes: str | Sequence[str] | None = None,
    offload_folder: PathLike | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> nn.Module:
    """Load the weights of a checkpoint into a model, each part on its device.

    Weights of `disk` are read from the safetensors files of the checkpoint, so these files have to stay where they are.
    Weights of other files, and those that are converted, are written to `offload_folder`. If the weights do not fit,
    nothing changes.

    Args:
        model: best built under `init_empty_weights`.
        checkpoint: see `load_checkpoint_in_model`.
        device_map: a device for each part by name, or how to make such a map. `auto` and `balanced` give each GPU the
            same amount, `balanced_low_0` gives the first one little, `sequential` fills one after the other.
        max_memory: for a map that is made, see `infer_auto_device_map`.
        no_split_module_classes: see `infer_auto_device_map`.
        offload_folder: for weights of `disk` that are in no safetensors file as they are.
        offload_buffers: see `dispatch_model`.
        dtype: floating point weights are cast to it.
        offload_state_dict: see `load_checkpoint_in_model`.
        skip_keys: see `dispatch_model`.
        preload_module_classes: see `dispatch_model`.
        force_hooks: see `dispatch_model`.
        strict: see `load_checkpoint_in_model`.
        full_state_dict: see `load_checkpoint_in_model`.
        broadcast_from_rank0: see `load_checkpoint_in_model`.

    Returns:
        The model.

    Raises:
        CheckpointError: the weights are damaged or do not fit; it names the file, the name and both shapes.
        ValueError: the map is not legal, or an argument is missing, unknown, or of no use with a map.
    """
    del offload_state_dict
    wanted = load.as_floating_dtype(dtype)
    load.check_sharded(device_map, full_state_dict, broadcast_from_rank0)
    if device_map is None:
        load.load_checkpoint_in_model(
            model,
            checkpoint,
            dtype=wanted,
            strict=strict,
            full_state_dict=full_state_dict,
            broadcast_from_rank0=broadcast_from_rank0,
        )
        return model
    chosen = make_device_map(
        model, device_map, max_memory, no_split_module_classes, wanted, offload_buffers=offload_buffers
    )

    def read() -> Index:
        loading = load.plan(
            model,
            checkpoint,
            chosen,
            offload_folder=offload_folder,
            dtype=wanted,
            offload_buffers=offload_buffers,
            strict=strict,
            whole=True,
        )
        return loading.run()

    return dispatch_model(
        model,
        chosen,
        offload_dir=offload_folder,
        offload_index=shards.read_unchanged(checkpoint, read),
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
    )


def make_device_map(
    model: nn.Module,
    device_map: str | DeviceMap,
    max_memory: Limits | None,
    no_split: str | Sequence[str] | None,
    dtype: torch.dtype | None,
    *,
    offload_buffers: bool = False,
) -> DeviceMap:
    """Return a device for each part of a model.

    Args:
        model: with the tensors.
        device_map: such a map, or how to make it; see `load_checkpoint_and_dispatch`.
        max_memory: see `infer_auto_device_map`.
        no_split: see `infer_auto_device_map`.
        dtype: floating point weights are cast to it.
        offload_buffers: see `dispatch_model`.

    Raises:
        ValueError: the word is unknown.
    """
    if not isinstance(device_map, str):
        return device_map
    if device_map not in STRATEGIES:
        raise ValueError(
            f"device_map {device_map!r} is unknown: give a device by name of each part, or one of "
            f"{', '.join(STRATEGIES)}"
        )
    if device_map != "sequential":
        max_memory = get_balanced_memory(
            model,
            max_memory=max_memory,
            no_split_module_classes=no_split,
            dtype=dtype,
            low_zero=device_map == "balanced_low_0",
        )
    return infer_auto_device_map(
        model,
        max_memory=max_memory,
        no_split_module_classes=no_split,
        dtype=dtype,
        offload_buffers=offload_buffers,
    )


def _note(model: nn.Module, device_map: DeviceMap) -> None:
    marked: Any = model
    marked.hf_device_map = dict(device_map)
