"""Which parts of a batch have an item for each sample: tensors, and lists such as those of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import nested


class Rows:
    """Stands in a batch for a list or tuple that has an item for each sample.

    Attributes:
        items: one for each sample.
    """

    __slots__ = ("items",)

    def __init__(self, items: Any) -> None:
        self.items = items

    def __getitem__(self, chosen: slice) -> Rows:
        return Rows(self.items[chosen])


def count_samples(batch: Any) -> int:
    """Return the length of the first tensor of a batch.

    Args:
        batch: nested data.

    Raises:
        ValueError: that tensor has no dimensions, or the batch is empty.
        TypeError: there is no tensor.
    """
    tensors = (leaf for leaf in nested.leaves_of(batch) if isinstance(leaf, torch.Tensor))
    return nested.find_batch_size(next(tensors, batch))


def mark_rows(batch: Any) -> Any:
    """Return a batch with `Rows` in place of every list and tuple that has an item for each sample.

    Such a list is one without tensors. A value that is in no list, like a text or None, belongs to the whole batch.

    Args:
        batch: nested data.

    Raises:
        TypeError: there is no tensor, or an array or a sparse tensor, or lists that count samples in two ways.
        ValueError: a tensor or list has another length than the first tensor.
    """
    return _mark(batch, count_samples(batch))


def slice_rows(batch: Any, chosen: slice) -> Any:
    """Return some samples of a batch.

    Args:
        batch: as `mark_rows` returns it, and as it is returned.
        chosen: which samples.
    """
    return nested.recursively_apply(lambda leaf: leaf[chosen], batch, test_type=_has_rows)


def take_rows(batch: Any, chosen: slice, *, of_tensors: bool) -> Any:
    """Return some samples of a batch, with lists and tuples in place of its `Rows`.

    Args:
        batch: as `mark_rows` returns it.
        chosen: which samples.
        of_tensors: False where the tensors have these samples only already.
    """

    def take(leaf: Any) -> Any:
        if isinstance(leaf, Rows):
            return leaf.items[chosen]
        return leaf[chosen] if of_tensors else leaf

    return nested.recursively_apply(take, batch, test_type=_has_rows)


def join_rows(batches: Sequence[Any]) -> Any:
    """Return one batch of the samples of several.

    Args:
        batches: as `mark_rows` returns them, of one structure.

    Raises:
        TypeError: what belongs to the whole batch differs.
    """
    return nested.combine(_join, batches)


def _mark(data: Any, length: int) -> Any:
    if isinstance(data, (list, tuple)) and not nested.is_namedtuple(data):
        return _mark_list(data, length)
    if isinstance(data, torch.Tensor):
        _check_tensor(data, length)
        return data
    if getattr(data, "shape", ()):
        raise TypeError(f"{type(data).__name__} is no tensor")
    return nested.map_children(lambda item: _mark(item, length), data)


def _mark_list(data: Any, length: int) -> Any:
    if not data or any(isinstance(leaf, torch.Tensor) for leaf in nested.leaves_of(data)):
        return nested.map_children(lambda item: _mark(item, length), data)
    holds_columns = all(isinstance(item, (list, tuple)) and len(item) == length for item in data)
    if len(data) == length and not holds_columns:
        return Rows(data)
    if len(data) == length:
        raise TypeError(
            f"a {type(data).__name__} of {length} lists with {length} items each in a batch of {length} samples: "
            "either may count the samples"
        )
    if holds_columns:
        return nested.map_children(Rows, data)
    raise ValueError(f"a {type(data).__name__} of {len(data)} items in a batch of {length} samples")


def _check_tensor(tensor: torch.Tensor, length: int) -> None:
    if tensor.layout != torch.strided:
        raise TypeError(f"a tensor with layout {tensor.layout} has no slices")
    if not tensor.is_nested and (tensor.ndim == 0 or len(tensor) != length):
        raise ValueError(f"a tensor of shape {list(tensor.shape)} in a batch of {length} samples")


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, (Rows, torch.Tensor))


def _join(leaves: Sequence[Any]) -> Any:
    first = leaves[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(leaves))
    if isinstance(first, Rows):
        return Rows(type(first.items)(item for leaf in leaves for item in leaf.items))
    if any(leaf is not first and leaf != first for leaf in leaves):
        raise TypeError(f"{first!r} belongs to one batch, {leaves[1]!r} to another")
    return first
