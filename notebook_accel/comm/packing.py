"""Packs the tensors of a tree into one flat buffer, and unpacks the gathered buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

_MAX_INDEXED: Final = 16_384
"""Elements of a gathered buffer up to which one indexing by a kept permutation is faster than a copy for each leaf."""
_MAX_LAYOUTS: Final = 128
_UNINDEXED: Final = frozenset((torch.uint16, torch.uint32, torch.uint64))
"""Dtypes that torch cannot index."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Section:
    """The leaves of one dtype.

    Attributes:
        dtype: theirs.
        indices: their positions among all leaves.
        first: where they begin in the gathered buffer.
        last: where they end in it.
        shapes: tensors of the shapes that they have after the gather.
    """

    dtype: torch.dtype
    indices: list[int]
    first: int
    last: int
    shapes: list[torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    order: torch.Tensor
    sections: list[_Section]


class Packing:
    """Keeps the layouts of trees of small tensors for gathers over `world_size` ranks.

    A gather of small tensors spends its time in the number of torch calls. A tree that came before is packed by one
    call for each dtype, and unpacked by one indexing and one call for each dtype.
    """

    def __init__(self, world_size: int, device: torch.device) -> None:
        self._world_size = world_size
        self._device = device
        self._layouts: dict[object, _Layout | None] = {}

    def layout(self, leaves: list[Any]) -> _Layout | None:
        """Return the layout of a tree that comes for the second time or later.

        Args:
            leaves: its leaves.

        Returns:
            None for a tree that is new, for a single leaf, and where tensors are too large or not plain.
        """
        if len(leaves) < 2:
            return None
        try:
            key = tuple([(leaf.shape, leaf.dtype, leaf.device) for leaf in leaves])
            seen = key in self._layouts
        except (AttributeError, TypeError, RuntimeError):  # a leaf is no plain tensor
            return None
        if not seen:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = None
            return None
        layout = self._layouts[key]
        if layout is None and _fits(leaves, self._world_size, self._device):
            layout = self._layouts[key] = _make_layout(leaves, self._world_size)
        return layout


def sort_by_dtype(leaves: Sequence[torch.Tensor]) -> list[int]:
    """Return the order in which leaves travel, which depends on nothing but their dtypes.

    Large items come first: the leaves of each dtype then start at a multiple of their item size.

    Args:
        leaves: the tensors.

    Returns:
        Their positions.
    """
    dtypes = {leaf.dtype for leaf in leaves}
    places = {dtype: place for place, dtype in enumerate(sorted(dtypes, key=_place_of_dtype))}
    return sorted(range(len(leaves)), key=lambda index: places[leaves[index].dtype])


def _place_of_dtype(dtype: torch.dtype) -> tuple[int, str]:
    return -dtype.itemsize, str(dtype)


def pack_by(layout: _Layout, leaves: list[torch.Tensor]) -> torch.Tensor:
    """Pack leaves by a layout.

    Args:
        layout: that of the leaves.
        leaves: the tensors.

    Returns:
        A flat buffer: of their dtype if they have one, of bytes if they have several.
    """
    if len(layout.sections) == 1:
        flat: torch.Tensor = _flatten_dense_tensors(leaves)
        return flat
    return torch.cat(
        [
            view_as_bytes(_flatten_dense_tensors([leaves[index] for index in section.indices]))
            for section in layout.sections
        ]
    )


def unpack_by(layout: _Layout, gathered: torch.Tensor, leaves: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Unpack a gathered buffer by a layout.

    Args:
        layout: that of the leaves.
        gathered: the buffers of all ranks, as `pack_by` makes them, one after the other.
        leaves: this rank's tensors.

    Returns:
        For each leaf the tensor of all ranks. All of them share one new storage.
    """
    ordered = gathered.index_select(0, layout.order)
    if len(layout.sections) == 1:
        views: Sequence[torch.Tensor] = _unflatten_dense_tensors(ordered, layout.sections[0].shapes)
        return views
    unpacked = list(leaves)
    for section in layout.sections:
        part = ordered[section.first : section.last].view(section.dtype)
        for index, leaf in zip(section.indices, _unflatten_dense_tensors(part, section.shapes), strict=True):
            unpacked[index] = leaf
    return unpacked


def pack(leaves: list[torch.Tensor], *, as_bytes: bool) -> tuple[torch.Tensor, list[int]]:
    """Pack leaves into one new flat buffer.

    Args:
        leaves: the tensors.
        as_bytes: make a buffer of bytes; then the dtypes may differ.

    Returns:
        The buffer, and the length of each leaf in it.
    """
    rows = [leaf.reshape(-1) for leaf in leaves]
    if as_bytes:
        rows = [view_as_bytes(row) for row in rows]
    return torch.cat(rows), [row.shape[0] for row in rows]


def unpack(
    gathered: torch.Tensor, sizes: list[int], leaves: list[torch.Tensor], world_size: int, *, as_bytes: bool
) -> list[torch.Tensor]:
    """Unpack the buffers that `pack` made on every rank.

    Args:
        gathered: all buffers, one after the other.
        sizes: the lengths that `pack` returned.
        leaves: this rank's tensors.
        world_size: number of ranks.
        as_bytes: as given to `pack`.

    Returns:
        For each leaf the tensor of all ranks.
    """
    pieces = gathered.view(world_size, -1).split(sizes, dim=1)
    return [_unpack_one(piece, leaf, as_bytes=as_bytes) for piece, leaf in zip(pieces, leaves, strict=True)]


def gathered_shape(leaf: torch.Tensor, world_size: int) -> tuple[int, ...]:
    """Return the shape of a leaf after a gather.

    Args:
        leaf: a tensor [n, ...] or [].
        world_size: number of ranks.

    Returns:
        [world_size * n, ...] or [world_size].
    """
    return (world_size * leaf.shape[0], *leaf.shape[1:]) if leaf.ndim else (world_size,)


def view_as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor [n], which is copied only if its memory is not that of its values in order.

    torch makes bytes of such tensors only. It calls a tensor of one element contiguous, whatever its stride is.

    Args:
        flat: of any dtype, strided or expanded.
    """
    in_order = flat.resolve_conj().resolve_neg().contiguous()
    return in_order.as_strided(in_order.shape, (1,)).view(torch.uint8)


def _unpack_one(piece: torch.Tensor, leaf: torch.Tensor, *, as_bytes: bool) -> torch.Tensor:
    if as_bytes:
        # a clone is contiguous and aligned for the dtype, which a view into the buffer need not be
        world_size = piece.shape[0]
        flat = piece.clone(memory_format=torch.contiguous_format).view(-1).view(leaf.dtype)
        return flat.view(gathered_shape(leaf, world_size))
    return piece.reshape(gathered_shape(leaf, piece.shape[0]))


def _fits(leaves: list[Any], world_size: int, device: torch.device) -> bool:
    if not all(isinstance(leaf, torch.Tensor) and leaf.device.type == device.type for leaf in leaves):
        return False
    single = len({leaf.dtype for leaf in leaves}) == 1
    size = sum(leaf.numel() * (1 if single else leaf.element_size()) for leaf in leaves)
    plain = all(
        leaf.numel() > 0
        and not leaf.is_complex()
        and leaf.layout == torch.strided
        and not (single and leaf.dtype in _UNINDEXED)
        for leaf in leaves
    )
    return plain and size * world_size <= _MAX_INDEXED


def _make_layout(leaves: list[torch.Tensor], world_size: int) -> _Layout:
    order = sort_by_dtype(leaves)
    dtypes = list(dict.fromkeys(leaves[index].dtype for index in order))
    sections, sizes, start = [], [], 0
    for dtype in dtypes:
        indices = [index for index in order if leaves[index].dtype == dtype]
        unit = 1 if len(dtypes) == 1 else dtype.itemsize
        sizes += [leaves[index].numel() * unit for index in indices]
        stop = start + world_size * sum(leaves[index].numel() * unit for index in indices)
        shapes = [
            torch.empty(1, dtype=dtype, device=leaves[index].device).expand(
                gathered_shape(leaves[index], world_size)
            )
            for index in indices
        ]
        sections.append(_Section(dtype=dtype, indices=indices, first=start, last=stop, shapes=shapes))
        start = stop
    positions = torch.arange(world_size * sum(sizes), device=leaves[0].device)
    places = torch.cat([part.reshape(-1) for part in positions.view(world_size, -1).split(sizes, dim=1)])
    return _Layout(order=places, sections=sections)
