"""Loads a checkpoint into a model whose parts are on several devices; checks everything before anything changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..caller import warn
from ..checkpointing import models, pickled, shards, weights
from ..checkpointing.folder import PathLike
from ..checkpointing.models import Source
from ..hooks import tensors
from ..hooks.align import remove_offload_hooks
from . import conversion, eight_bit, offload, ties
from .device_map import DeviceMap, check_buffers, check_device_map, check_devices, check_devices_exist
from .placing import Loading, Slot, list_slots


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: PathLike,
    device_map: DeviceMap | None = None,
    offload_folder: PathLike | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: list[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load the weights of a file, an index or a folder into a model. If they do not fit, nothing changes.

    Args:
        model: not wrapped; tensors on the meta device get values too.
        checkpoint: a safetensors file or one of torch.save, an index of several, or a folder with one of these. For a
            model of Transformers it may have the names of the hub: weights are converted as `from_pretrained` does.
        device_map: a device for each part by name; weights of `disk` go to the meta device. Without it tensors stay
            where they are, and those on the meta device come to the CPU.
        offload_folder: gets an index of the weights of `disk`, and files of those that are in no safetensors file.
        dtype: floating point weights are cast to it; without `device_map`, all floating point tensors of the model.
        offload_state_dict: accepted and not needed: only weights that stay in memory take memory.
        offload_buffers: buffers of `disk` go there too.
        keep_in_fp32_modules: with `dtype` float16, names of modules that get float32.
        offload_8bit_bnb: 8-bit layers of bitsandbytes without values become such whose int8 weights can be on the disk
            and on several devices; see `load_and_quantize_model`.
        strict: refuse names that are missing or unknown. By default unknown names are warned of.
        full_state_dict: False if the checkpoint has only this process's part of sharded weights; without a map.
        broadcast_from_rank0: read the checkpoint in rank 0 only, which sends it to the others; without a map.

    Raises:
        CheckpointError: the weights are damaged or do not fit; it names the file, the name and both shapes.
        ValueError: the map leaves a tensor without a device, or an argument is missing or unknown.
    """
    wanted = as_floating_dtype(dtype)
    check_sharded(device_map, full_state_dict, broadcast_from_rank0)
    with eight_bit.replace_layers(model) if offload_8bit_bnb else contextlib.nullcontext():
        if broadcast_from_rank0 or not full_state_dict:
            _load_sharded(model, checkpoint, wanted, strict, full_state_dict, broadcast_from_rank0)
            return
        has_empty = any(slot.tensor.is_meta for slot in list_slots(model))

        def read() -> None:
            if device_map is None and not has_empty:
                _load_in_place(model, checkpoint, wanted, keep_in_fp32_modules or [], strict)
                return
            loading = plan(
                model,
                checkpoint,
                device_map,
                offload_folder=offload_folder,
                dtype=wanted,
                keep_in_fp32_modules=keep_in_fp32_modules or [],
                offload_buffers=offload_buffers,
                strict=strict,
            )
            if loading.on_disk and offload_folder is None:
                raise ValueError(
                    f"{', '.join(loading.on_disk[:3])} of the device map are on disk: give an offload_folder, which "
                    "gets an index; load_checkpoint_and_dispatch needs none for safetensors files"
                )
            index = loading.run()
            if device_map is None and not any(slot.tensor.is_meta for slot in list_slots(model)):
                remove_offload_hooks(
                    model
                )  # the model was offloaded before: they would bring the weights of then
            if offload_folder is not None:
                offload.save_offload_index(index, offload_folder)

        shards.read_unchanged(checkpoint, read)


def as_floating_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return the dtype that weights are cast to.

    Args:
        dtype: of torch, or its name; None stays None.

    Raises:
        ValueError: it is no floating point dtype.
    """
    found = tensors.as_dtype(dtype)
    if found is not None and not found.is_floating_point:
        raise ValueError(f"dtype {dtype!r}: weights are cast to a floating point dtype such as 'bfloat16'")
    return found


def check_sharded(device_map: Any, full_state_dict: bool, broadcast_from_rank0: bool) -> None:
    """Check that the arguments for models of several processes go together.

    Args:
        device_map: as given to `load_checkpoint_in_model`.
        full_state_dict: likewise.
        broadcast_from_rank0: likewise.

    Raises:
        ValueError: they do not.
    """
    if broadcast_from_rank0 and not full_state_dict:
        raise ValueError(
            "broadcast_from_rank0=True sends whole weights: full_state_dict=False cannot go with it"
        )
    if device_map is not None and (broadcast_from_rank0 or not full_state_dict):
        given = "broadcast_from_rank0=True" if broadcast_from_rank0 else "full_state_dict=False"
        raise ValueError(
            f"{given} is for models of several processes, whose weights no device_map places: leave one"
        )


def _load_in_place(
    model: nn.Module, checkpoint: PathLike, dtype: torch.dtype | None, keep: list[str], strict: bool
) -> None:
    sources = conversion.open_sources(model, checkpoint)
    formats = eight_bit.list_formats(model)
    apply = models.plan(model, sources, strict=strict, unused=formats)
    if not strict:
        _warn_of_unknown(checkpoint, sources, {*models.plain_state(model), *formats})
    if dtype is not None:
        # also buffers that are in no state dict
        for slots in _group_by_tensor(list_slots(model, persistent=False)):
            tensor, wanted = slots[0].tensor, _dtype_of(slots, dtype, keep)
            if tensor.dtype != wanted:
                tensor.data = tensor.data.to(wanted)
        apply = models.plan(model, sources, strict=strict, unused=formats)
    apply()
    conversion.note_conversion(model, sources)


def _warn_of_unknown(checkpoint: PathLike, sources: Sequence[Source], known: set[str]) -> None:
    names = {name for source in sources for name in source.shapes}
    renamed = models.strip_prefixes(names, known)
    if unknown := sorted(name for name in names if renamed(name) not in known):
        warn(f"{checkpoint} has weights that the model does not use: {unknown}")


def _group_by_tensor(slots: Iterable[Slot]) -> list[list[Slot]]:
    groups: dict[int, list[Slot]] = {}
    for slot in slots:
        groups.setdefault(id(slot.tensor), []).append(slot)
    return list(groups.values())


def _dtype_of(slots: Sequence[Slot], dtype: torch.dtype | None, keep: Sequence[str]) -> torch.dtype:
    """Return the dtype that the tensor with these names gets."""
    tensor = slots[0].tensor
    is_scales = any(eight_bit.is_scales(slot.owner, slot.key) for slot in slots)
    if dtype is None or is_scales or not tensor.is_floating_point():
        return tensor.dtype
    names = [slot.name for slot in slots]
    kept = any(name == part or f"{part}." in name for name in names for part in keep)
    return torch.float32 if kept and dtype == torch.float16 else dtype


def _load_sharded(
    model: nn.Module,
    checkpoint: PathLike,
    dtype: torch.dtype | None,
    strict: bool,
    full_state_dict: bool,
    broadcast_from_rank0: bool,
) -> None:
    """Let torch give each process its part."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if broadcast_from_rank0 and not distributed:
        raise ValueError("broadcast_from_rank0=True needs a process group: launch several processes")
    state: dict[str, Any] = {}
    sources: Sequence[Source] = ()
    if not broadcast_from_rank0 or torch.distributed.get_rank() == 0:
        sources = conversion.open_sources(model, checkpoint)
        for source in sources:
            state |= source.read()
    if dtype is not None:
        model.to(dtype)
    options = StateDictOptions(
        full_state_dict=full_state_dict, broadcast_from_rank0=broadcast_from_rank0, strict=strict
    )
    set_model_state_dict(model, state, options=options)
    conversion.note_conversion(model, sources)


def load_state_dict(checkpoint_file: PathLike, device_map: DeviceMap | None = None) -> dict[str, Any]:
    """Return the weights in a file by name.

    Args:
        checkpoint_file: a safetensors file or one of torch.save.
        device_map: a device for each part by name. Weights of `disk`, and all without a map, come to the CPU.

    Raises:
        CheckpointError: the file is damaged.
    """
    if device_map is not None:
        check_devices(device_map)
    path = Path(checkpoint_file).expanduser()
    content: dict[str, Any]
    if path.suffix == ".safetensors":
        content = dict(weights.read(path))
    else:
        content = pickled.read(path)
    for name, value in content.items() if device_map is not None else ():
        device = ties.find_device(name, device_map or {})
        if isinstance(value, torch.Tensor) and device not in (None, "disk"):
            content[name] = value.to(tensors.as_device(device))
    return content


def plan(
    model: nn.Module,
    checkpoint: PathLike,
    device_map: DeviceMap | None,
    *,
    offload_folder: PathLike | None = None,
    dtype: torch.dtype | None = None,
    keep_in_fp32_modules: Sequence[str] = (),
    offload_buffers: bool = False,
    strict: bool = False,
    whole: bool = False,
) -> Loading:
    """Check a checkpoint against a model and a device map, and return what loads it.

    Args:
        model: see `load_checkpoint_in_model`.
        checkpoint: likewise.
        device_map: likewise.
        offload_folder: likewise.
        dtype: likewise.
        keep_in_fp32_modules: likewise.
        offload_buffers: likewise.
        strict: likewise.
        whole: refuse a model that would keep a tensor without values.

    Raises:
        CheckpointError: the weights are damaged or do not fit.
        ValueError: the map is not legal here.
    """
    if device_map is not None:
        check_device_map(model, device_map)
        check_devices_exist(device_map)
    if whole:
        check_buffers(model)
    sources = conversion.open_sources(model, checkpoint)
    loading = Loading(model=model, sources=sources, folder=offload_folder)
    groups = _group_by_tensor(list_slots(model))
    loading.check_names(groups, strict=strict, whole=whole)
    if not strict:
        _warn_of_unknown(checkpoint, sources, loading.known)
    for group in groups:
        found = loading.find_source(group)
        if found is None:
            continue
        by_device: dict[Any, list[Slot]] = {}
        for slot in group:
            by_device.setdefault(_place(slot, device_map, offload_buffers), []).append(slot)
        for device, slots in by_device.items():
            target = _dtype_of(slots, dtype, keep_in_fp32_modules)
            loading.add(slots, *found, device=device, dtype=target)
    loading.check_folder()
    return loading


def _place(slot: Slot, device_map: DeviceMap | None, offload_buffers: bool) -> str | torch.device:
    if device_map is None:
        return torch.device("cpu") if slot.tensor.is_meta else slot.tensor.device
    device = ties.find_device(slot.name, device_map)
    assert device is not None  # check_device_map found one for each
    if device == "disk":
        return torch.device("cpu") if slot.is_buffer and not offload_buffers else "disk"
    return tensors.as_device(device)
