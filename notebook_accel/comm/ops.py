"""Collectives over nested data: few messages, however many tensors there are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from .. import nested
from ..caller import warn
from .base import Comm
from .check import compare_inputs
from .packing import pack, pack_by, sort_by_dtype, unpack, unpack_by

REDUCTIONS: Final = ("sum", "mean", "max", "none")
_WIDER: Final = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
    **({torch.float8_e8m0fnu: torch.float32} if hasattr(torch, "float8_e8m0fnu") else {}),
}
"""What tensors are reduced in whose own dtype no backend knows."""


class CannotPadNestedTensorWarning(UserWarning):
    """A `torch.nested` tensor stays as it is, because its rows have no common length to pad to."""


def gather(comm: Comm, tensor: Any) -> Any:
    """Concatenate every tensor over all ranks on dim 0.

    All tensors travel in one flat buffer, so a tree costs one collective.

    Args:
        comm: the collectives.
        tensor: nested data of tensors [n, ...] or []; ranks have to agree about shapes and dtypes.

    Returns:
        The same structure with tensors [world_size * n, ...] or [world_size]; the input itself in a single process.

    Raises:
        TypeError: something in it is no tensor.
    """
    if comm.world_size == 1:
        return tensor
    if comm.debug:
        compare_inputs(comm, "gather", nested.flatten(tensor))
    if type(tensor) is torch.Tensor:
        return _gather_leaves(comm, [tensor])[0]
    # a plain list of leaves: this is the one collective that training loops call for every batch
    return nested.refill(tensor, _gather_leaves(comm, nested.leaves_of(tensor, by_key=True)))


def _gather_leaves(comm: Comm, leaves: list[Any]) -> Sequence[torch.Tensor]:
    layout = comm.packing.layout(leaves)
    if layout is not None:  # this tree came before, and all of it is on the right device
        return unpack_by(layout, comm.all_gather(pack_by(layout, leaves).detach()), leaves)
    tensors = [leaf.detach() for leaf in _tensors(leaves, "gather", comm.device)]
    if not tensors:
        return []
    if len(tensors) == 1 and not tensors[0].is_complex():
        leaf = tensors[0]
        return [comm.all_gather(leaf if leaf.ndim else leaf.reshape(1))]
    as_bytes = tensors[0].is_complex() or any(leaf.dtype != tensors[0].dtype for leaf in tensors)
    # the order of a layout: other ranks may have one
    order = sort_by_dtype(tensors)
    ordered = [tensors[index] for index in order]
    buffer, sizes = pack(ordered, as_bytes=as_bytes)
    unpacked = unpack(comm.all_gather(buffer), sizes, ordered, comm.world_size, as_bytes=as_bytes)
    for index, leaf in zip(order, unpacked, strict=True):
        tensors[index] = leaf
    return tensors


def _tensors(leaves: list[Any], operation: str, device: torch.device) -> list[torch.Tensor]:
    """Return the leaves on the device of the collectives; TypeError if one is no tensor."""
    placed = []
    kind = device.type
    for leaf in leaves:
        _check_tensor(leaf, operation)
        placed.append(leaf if leaf.device.type == kind else leaf.to(device))
    return placed


def _check_kind(leaf: Any, operation: str) -> None:
    """Raise TypeError for what is no tensor."""
    if not isinstance(leaf, torch.Tensor):
        raise TypeError(
            f"{operation} takes nested tuples, lists, dicts and dataclasses of tensors, but found "
            f"{type(leaf).__name__}; use gather_object for other objects"
        )


def _check_tensor(leaf: Any, operation: str) -> None:
    """Raise TypeError for what no collective takes."""
    _check_kind(leaf, operation)
    if leaf.layout is not torch.strided and not leaf.is_nested:
        raise TypeError(
            f"{operation} takes dense tensors, but found one with layout {leaf.layout}: pass tensor.to_dense()"
        )
    if leaf.is_quantized:
        raise TypeError(
            f"{operation} takes no quantized tensor, but found a quantized one: pass tensor.dequantize()"
        )


def gather_object(comm: Comm, object: Any) -> Any:
    """Join the lists of all ranks into one, in rank order.

    Args:
        comm: the collectives.
        object: a list of items that can be pickled.

    Returns:
        The joined list; the input itself in a single process.

    Raises:
        TypeError: on every rank, if one of them passed no list.
    """
    if comm.world_size == 1:
        return object
    return join_lists(comm.all_gather_object(object))


def join_lists(parts: Sequence[Any]) -> list[Any]:
    """Return one list of those of all ranks.

    Args:
        parts: by rank.

    Raises:
        TypeError: one of them is no list.
    """
    for rank, part in enumerate(parts):
        if not isinstance(part, Iterable) or isinstance(part, (str, bytes, Mapping)):
            raise TypeError(
                f"gather_object takes a list on every rank, but rank {rank} passed {type(part).__name__}: "
                "wrap a single object as [object]"
            )
    return [item for part in parts for item in part]


def broadcast(comm: Comm, tensor: Any, from_process: int = 0) -> Any:
    """Overwrite every tensor in place with that of one rank, in one message.

    Args:
        comm: the collectives.
        tensor: nested data; ranks have to agree about shapes and dtypes.
        from_process: the rank whose values are taken.

    Returns:
        The same structure with the same tensors. In place of an expanded tensor, which has no memory of its own for
        every element, and of one on another device than that of the collectives, there is a new one.

    Raises:
        TypeError: something in it is no tensor.
        ValueError: there is no such rank.
    """
    _check_rank(comm, from_process)
    if comm.world_size == 1:
        return tensor
    flat = nested.flatten(tensor)
    if comm.debug:
        compare_inputs(comm, "broadcast", flat)
    leaves = _tensors(flat.leaves, "broadcast", comm.device)
    if not leaves:
        return tensor
    with torch.no_grad():
        buffer, sizes = pack(leaves, as_bytes=True)
        comm.broadcast(buffer, from_process)
        leaves = [leaf.contiguous() if _is_expanded(leaf) else leaf for leaf in leaves]
        if comm.rank != from_process:
            for piece, leaf in zip(buffer.split(sizes), leaves, strict=True):
                leaf.copy_(piece.clone().view(leaf.dtype).view(leaf.shape))
    return flat.rebuild(leaves)


def broadcast_object_list(comm: Comm, object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Overwrite a list in place with that of one rank.

    Args:
        comm: the collectives.
        object_list: a list of items that can be pickled.
        from_process: the rank whose list is taken.

    Returns:
        The same list.

    Raises:
        ValueError: there is no such rank.
    """
    _check_rank(comm, from_process)
    if comm.world_size > 1:
        object_list[:] = comm.broadcast_object(object_list, from_process)
    return object_list


def reduce(comm: Comm, tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Combine every tensor over all ranks into a new one.

    The tensors of one dtype travel in one buffer.

    Args:
        comm: the collectives.
        tensor: nested data; ranks have to agree about shapes and dtypes.
        reduction: `sum`, `mean`, `max`, or `none`, which copies the tensors without a collective.
        scale: factor of each result.

    Returns:
        The same structure with new tensors. The mean of integers is a float tensor, but in a single process, which
        changes no value. Integers of 16 bits, and floats of 8, are computed in a wider dtype. Gradients of a result go
        to the tensor of this rank, with the scale of the mean.

    Raises:
        ValueError: the reduction is none of these.
        TypeError: something in it is no tensor, or a tensor of bools or of 64 bits without sign, or a sparse one.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction {reduction!r} is unknown, choose among {', '.join(REDUCTIONS)}")
    flat = nested.flatten(tensor)
    if comm.debug and comm.world_size > 1:
        compare_inputs(comm, "reduce", flat)
    leaves = _tensors(flat.leaves, "reduce", comm.device)
    if reduction == "mean" and comm.world_size > 1:
        leaves = [leaf if _is_inexact(leaf) else leaf.to(torch.get_default_dtype()) for leaf in leaves]
    narrow = [leaf.dtype for leaf in leaves]
    leaves = [leaf.to(_WIDER.get(leaf.dtype, leaf.dtype)) for leaf in leaves]
    wide = [leaf.dtype for leaf in leaves]
    if reduction == "none" or comm.world_size == 1:
        reduced = [leaf.clone() for leaf in leaves]
    else:
        reduced = _reduce_leaves(comm, leaves, "max" if reduction == "max" else "sum")
        reduced = [_keep_graph(leaf, value) for leaf, value in zip(leaves, reduced, strict=True)]
        if reduction == "mean":
            scale = scale / comm.world_size
    if scale != 1.0:
        reduced = [leaf * scale for leaf in reduced]
    return flat.rebuild(
        [
            leaf.to(own) if leaf.dtype == other else leaf
            for leaf, own, other in zip(reduced, narrow, wide, strict=True)
        ]
    )


def _keep_graph(leaf: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a value whose gradient goes to the tensor of this rank that was reduced, unchanged."""
    if not (leaf.requires_grad and torch.is_grad_enabled()):
        return value
    kept = leaf.clone()
    kept.detach().copy_(value)
    return kept


@torch.no_grad()
def _reduce_leaves(comm: Comm, leaves: list[torch.Tensor], op: Any) -> list[torch.Tensor]:
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, leaf in enumerate(leaves):
        by_dtype.setdefault(leaf.dtype, []).append(index)
    if torch.bool in by_dtype:
        raise TypeError("bool tensors cannot be reduced: convert them to an integer dtype, which counts")
    if torch.uint64 in by_dtype:
        raise TypeError("uint64 tensors cannot be reduced: convert them to int64")
    reduced: list[torch.Tensor] = list(leaves)
    for indices in by_dtype.values():
        buffer, sizes = pack([leaves[index] for index in indices], as_bytes=False)
        comm.all_reduce(buffer, op)
        for index, piece in zip(indices, buffer.split(sizes), strict=True):
            reduced[index] = piece.view(leaves[index].shape)
    return reduced


def pad_across_processes(
    comm: Comm,
    tensor: Any,
    dim: int = 0,
    pad_index: float | torch.Tensor = 0,
    pad_first: bool = False,
) -> Any:
    """Pad every tensor along a dimension to the longest of all ranks.

    All lengths travel in one collective.

    Args:
        comm: the collectives.
        tensor: nested data. A tensor without that dimension, or of torch.nested, stays as it is.
        dim: the dimension.
        pad_index: the value to pad with, or a tensor of it.
        pad_first: pad at the beginning instead of the end.

    Returns:
        The same structure with tensors of equal length along `dim`.

    Raises:
        TypeError: something in it is no tensor.
    """
    if comm.world_size == 1:
        if type(tensor) is torch.Tensor and not tensor.is_nested:
            return tensor
        flat = nested.flatten(tensor)
        for leaf in flat.leaves:
            _check_kind(leaf, "pad_across_processes")
            _check_nested(leaf)
        return flat.rebuild(flat.leaves)
    flat = nested.flatten(tensor)
    if comm.debug:
        compare_inputs(comm, "pad_across_processes", flat, free_dim=dim)
    leaves = _tensors(flat.leaves, "pad_across_processes", comm.device)
    lengths = [_length(leaf, dim) for leaf in leaves]
    if max(lengths, default=-1) < 0:
        return tensor
    # in Python: a torch call costs more than all of these few numbers
    everyone = comm.all_gather(torch.tensor(lengths, device=comm.device)).tolist()
    longest = [max(everyone[place :: len(leaves)]) for place in range(len(leaves))]
    padded = [
        _pad(leaf, dim, length, pad_index, pad_first) for leaf, length in zip(leaves, longest, strict=True)
    ]
    return flat.rebuild(padded)


def _length(leaf: torch.Tensor, dim: int) -> int:
    """Return the length along `dim`, -1 where it cannot be padded."""
    if _check_nested(leaf).is_nested:
        return -1
    return leaf.shape[dim] if -leaf.ndim <= dim < leaf.ndim else -1


def _check_nested(leaf: torch.Tensor) -> torch.Tensor:
    """Return the tensor; warn where no rank can pad it."""
    if leaf.is_nested:
        warn("a nested tensor cannot be padded and stays as it is", CannotPadNestedTensorWarning)
    return leaf


def _pad(
    leaf: torch.Tensor, dim: int, length: int, pad_index: float | torch.Tensor, pad_first: bool
) -> torch.Tensor:
    if length < 0 or leaf.shape[dim] == length:
        return leaf
    shape = list(leaf.shape)
    shape[dim] = length - leaf.shape[dim]
    if isinstance(pad_index, torch.Tensor):
        filler = pad_index.to(leaf).expand(shape)
    else:
        filler = leaf.new_full(shape, pad_index)
    return torch.cat([filler, leaf] if pad_first else [leaf, filler], dim=dim)


def _is_expanded(leaf: torch.Tensor) -> bool:
    return any(step == 0 and size > 1 for step, size in zip(leaf.stride(), leaf.shape, strict=True))


def _is_inexact(leaf: torch.Tensor) -> bool:
    return leaf.is_floating_point() or leaf.is_complex()


def _check_rank(comm: Comm, rank: int) -> None:
    if not 0 <= rank < comm.world_size:
        raise ValueError(f"from_process {rank} is no rank of a run with {comm.world_size} processes")
