"""Which parts of a batch have an item for each sample: tensors, and lists such as those of texts."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Number
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

    Such a list has as many items as the first tensor has rows, and it has neither tensors nor bare numbers as items.
    A list of tuples of that many texts, as `default_collate` makes it, has a column of items in each tuple. All other
    values belong to the whole batch: other lists, a text or None.

    Args:
        batch: nested data.

    Raises:
        TypeError: there is no tensor, or an array or a sparse tensor.
        ValueError: a tensor has another length than the first one.
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
        TypeError: what belongs to the whole batch differs, or the structures do.
    """
    return nested.combine(_join, batches)


def complete_rows(batch: Any, lent: Any, repeats: int) -> Any:
    """Return a batch with the samples of another one behind its own; all other values are its own.

    Args:
        batch: as `mark_rows` returns it.
        lent: the batch that lends its samples.
        repeats: how often they are lent.

    Raises:
        TypeError: a part of the batch has an item for each sample, and this part of the other one has not.
    """
    flat = nested.flatten(lent)
    others = dict(zip(flat.paths(), flat.leaves, strict=True))
    own = nested.flatten(batch)
    return own.rebuild(
        [
            _join([leaf, *[others.get(path)] * repeats]) if _has_rows(leaf) else leaf
            for path, leaf in zip(own.paths(), own.leaves, strict=True)
        ]
    )


def _mark(data: Any, length: int) -> Any:
    if isinstance(data, (list, tuple)) and not nested.is_namedtuple(data):
        return _mark_list(data, length)
    if isinstance(data, torch.Tensor):
        _check_tensor(data, length)
        return data
    _refuse_array(data)
    return nested.map_children(lambda item: _mark(item, length), data)


def _mark_list(data: Any, length: int) -> Any:
    if not data or any(isinstance(leaf, torch.Tensor) for leaf in nested.leaves_of(data)):
        return nested.map_children(lambda item: _mark(item, length), data)
    if _holds_columns(data, length):
        return _mark_columns(data)
    if len(data) == length and not all(isinstance(item, Number) for item in data):
        return Rows(data)
    for leaf in nested.leaves_of(data):
        _refuse_array(leaf)
    return data


def _holds_columns(data: Any, length: int) -> bool:
    """Return whether a list is one of tuples of `length` texts, or of lists of such."""
    return (
        isinstance(data, list)
        and len(data) > 0
        and all(_is_column(item, length) or _holds_columns(item, length) for item in data)
    )


def _is_column(data: Any, length: int) -> bool:
    return (
        type(data) is tuple and len(data) == length and all(isinstance(item, (str, bytes)) for item in data)
    )


def _mark_columns(data: Any) -> Any:
    return Rows(data) if type(data) is tuple else nested.map_children(_mark_columns, data)


def _refuse_array(data: Any) -> None:
    if getattr(data, "shape", ()):
        raise TypeError(f"{type(data).__name__} is no tensor")


def _check_tensor(tensor: torch.Tensor, length: int) -> None:
    if tensor.layout != torch.strided:
        raise TypeError(f"a tensor with layout {tensor.layout} has no slices")
    if not tensor.is_nested and (tensor.ndim == 0 or len(tensor) != length):
        raise ValueError(f"a tensor of shape {list(tensor.shape)} in a batch of {length} samples")


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, (Rows, torch.Tensor))


def _join(leaves: Sequence[Any]) -> Any:
    first = leaves[0]
    for kind in (torch.Tensor, Rows):
        if 0 < sum(isinstance(leaf, kind) for leaf in leaves) < len(leaves):
            raise TypeError("a tensor or list has an item for each sample in one batch, and not in another")
    if isinstance(first, torch.Tensor):
        return torch.cat(list(leaves))
    if isinstance(first, Rows):
        return Rows(type(first.items)(item for leaf in leaves for item in leaf.items))
    for leaf in leaves:
        if leaf is not first and leaf != first and (leaf == leaf or first == first):  # NaN is as NaN
            raise TypeError(f"{first!r} belongs to one batch, {leaf!r} to another")
    return first
