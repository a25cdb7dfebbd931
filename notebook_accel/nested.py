"""Walks over nested data: tuples, lists, named tuples, mappings and dataclasses with tensors as leaves."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Predicate = Callable[[Any], bool]


def is_tensor(value: object) -> bool:
    """Return True for a `torch.Tensor`."""
    return isinstance(value, torch.Tensor)


def is_namedtuple(value: object) -> bool:
    """Return True for an instance of a `namedtuple` type."""
    return isinstance(value, tuple) and hasattr(value, "_fields") and hasattr(value, "_asdict")


def honor_type(obj: Any, values: Iterable[Any]) -> Any:
    """Return the values as a sequence of the type of another.

    Args:
        obj: a list, tuple, named tuple, or an instance of a subclass of these.
        values: the items.
    """
    kind = type(obj)
    if kind is tuple or kind is list:
        return kind(values)
    if is_namedtuple(obj):
        return kind(*values)
    return kind(list(values))


def _is_record(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _like_mapping(obj: Any, items: dict[Any, Any]) -> Any:
    kind = type(obj)
    if kind is dict:
        return items
    if isinstance(obj, defaultdict):
        return kind(obj.default_factory, items)
    return kind(items)


def _like_record(obj: Any, values: dict[str, Any]) -> Any:
    copied = copy.copy(obj)
    for name, value in values.items():
        object.__setattr__(copied, name, value)
    return copied


def _map(apply: Callable[[Any], Any], data: Any) -> Any:
    """Return the same containers with `apply` called on every leaf."""
    if isinstance(data, torch.Tensor):
        return apply(data)
    if isinstance(data, (tuple, list, Mapping)) or _is_record(data):
        return map_children(functools.partial(_map, apply), data)
    return apply(data)


def map_children(func: Callable[[Any], Any], data: Any) -> Any:
    """Return the same container with `func(item)` in place of each of its items; a leaf as it is.

    Args:
        func: called with each item.
        data: a container, whose items may be containers too.
    """
    if isinstance(data, (tuple, list)):
        return honor_type(data, [func(item) for item in data])
    if isinstance(data, Mapping):
        return _like_mapping(data, {key: func(data[key]) for key in data})
    if _is_record(data):
        return _like_record(
            data, {field.name: func(getattr(data, field.name)) for field in dataclasses.fields(data)}
        )
    return data


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Predicate = is_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Return the same containers with `func(leaf, *args, **kwargs)` in place of every leaf that `test_type` accepts.

    Args:
        func: called with each of these leaves.
        data: nested data.
        args: further arguments of `func`.
        test_type: says whether to change a leaf.
        error_on_other_type: raise for other leaves; by default they stay as they are.
        kwargs: keyword arguments of `func`.

    Raises:
        TypeError: there is another leaf, and `error_on_other_type` is True.
    """

    def apply(leaf: Any) -> Any:
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        if error_on_other_type:
            raise TypeError(
                f"{getattr(func, '__name__', func)} takes nested tuples, lists, dicts and dataclasses of what "
                f"{getattr(test_type, '__name__', test_type)} accepts, but found {type(leaf).__name__}"
            )
        return leaf

    return _map(apply, data)


@dataclass(frozen=True, kw_only=True, slots=True)
class Flat:
    """The leaves of nested data.

    Attributes:
        tree: the nested data itself.
        leaves: its leaves, depth first, those of mappings by key.
    """

    tree: Any
    leaves: list[Any]

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """Return the same containers with other leaves.

        Args:
            leaves: as many as `self.leaves`, in their order.

        Raises:
            ValueError: there are more or fewer.
        """
        if len(leaves) != len(self.leaves):
            raise ValueError(f"{len(leaves)} leaves given != {len(self.leaves)} leaves of the tree")
        return _refill(self.tree, iter(leaves))

    def paths(self, root: str = "") -> list[str]:
        """Return the path to each leaf as Python code: `root['labels'][0].mask`.

        Args:
            root: name of the nested data.
        """
        return list(_paths(self.tree, root))


def leaves_of(tree: Any, *, by_key: bool = False) -> list[Any]:
    """Return the leaves of nested data, depth first.

    Args:
        tree: the nested data.
        by_key: take those of mappings in the order of their keys, so that ranks whose dicts were filled in different
            orders name the same leaf by the same number.
    """
    leaves: list[Any] = []
    _collect(tree, leaves, _order_keys if by_key else iter)
    return leaves


def refill(tree: Any, leaves: Iterable[Any]) -> Any:
    """Return the same containers with other leaves.

    Args:
        tree: nested data.
        leaves: as many as the tree has, in the order of `leaves_of` by key.
    """
    return _refill(tree, iter(leaves))


def flatten(tree: Any) -> Flat:
    """Return nested data with its leaves.

    Args:
        tree: the nested data.
    """
    return Flat(tree=tree, leaves=leaves_of(tree, by_key=True))


def _collect(data: Any, leaves: list[Any], keys: Callable[[Any], Iterable[Any]]) -> None:
    kind = type(data)
    if kind is torch.Tensor:
        leaves.append(data)
    elif kind is dict:
        for key in keys(data):
            _collect(data[key], leaves, keys)
    elif isinstance(data, (tuple, list)):
        for item in data:
            _collect(item, leaves, keys)
    elif isinstance(data, torch.Tensor):
        leaves.append(data)
    elif isinstance(data, Mapping):
        for key in keys(data):
            _collect(data[key], leaves, keys)
    elif _is_record(data):
        for field in dataclasses.fields(data):
            _collect(getattr(data, field.name), leaves, keys)
    else:
        leaves.append(data)


def _order_keys(data: Mapping[Any, Any]) -> list[Any]:
    """Return the keys in an order that does not depend on when they were set; as they are if they have none."""
    try:
        return sorted(data)
    except TypeError:
        return list(data)


def _refill(data: Any, leaves: Iterator[Any]) -> Any:
    kind = type(data)
    if kind is torch.Tensor:
        return next(leaves)
    if kind is list:
        return [_refill(item, leaves) for item in data]
    if kind is tuple:
        return tuple([_refill(item, leaves) for item in data])
    if isinstance(data, Mapping):
        items = {key: _refill(data[key], leaves) for key in _order_keys(data)}
        return _like_mapping(data, {key: items[key] for key in data})
    return next(leaves) if isinstance(data, torch.Tensor) else _refill_others(data, leaves)


def _refill_others(data: Any, leaves: Iterator[Any]) -> Any:
    if isinstance(data, (tuple, list)) or _is_record(data):
        return map_children(lambda item: _refill(item, leaves), data)
    return next(leaves)


def _paths(data: Any, here: str) -> Iterator[str]:
    if isinstance(data, (tuple, list)):
        names = [f".{name}" for name in data._fields] if is_namedtuple(data) else []  # type: ignore[union-attr]
        for index, item in enumerate(data):
            yield from _paths(item, here + (names[index] if names else f"[{index}]"))
    elif isinstance(data, Mapping):
        for key in _order_keys(data):
            yield from _paths(data[key], f"{here}[{key!r}]")
    elif not isinstance(data, torch.Tensor) and _is_record(data):
        for field in dataclasses.fields(data):
            yield from _paths(getattr(data, field.name), f"{here}.{field.name}")
    else:
        yield here


def send_to_device(
    tensor: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Sequence[str] | None = None,
) -> Any:
    """Return the same containers with every tensor, and every object with a method `to`, on a device.

    Args:
        tensor: nested data.
        device: where to.
        non_blocking: let copies from pinned memory overlap with computation; a `to` without this argument is called
            without it.
        skip_keys: keys of mappings whose values are not moved.
    """
    skipped = (skip_keys,) if isinstance(skip_keys, str) else tuple(skip_keys or ())
    return _send(tensor, device, non_blocking, skipped)


def _send(data: Any, device: torch.device | str | int, non_blocking: bool, skipped: tuple[str, ...]) -> Any:
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=non_blocking)
    if hasattr(data, "to"):
        return _move_object(data, device, non_blocking)
    if isinstance(data, (tuple, list)):
        return honor_type(data, [_send(item, device, non_blocking, skipped) for item in data])
    if isinstance(data, Mapping):
        moved = {
            key: value if key in skipped else _send(value, device, non_blocking, skipped)
            for key, value in data.items()
        }
        return _like_mapping(data, moved)
    if _is_record(data):
        values = {field.name: getattr(data, field.name) for field in dataclasses.fields(data)}
        return _like_record(
            data, {name: _send(value, device, non_blocking, skipped) for name, value in values.items()}
        )
    return data


def _move_object(data: Any, device: torch.device | str | int, non_blocking: bool) -> Any:
    try:
        return data.to(device, non_blocking=non_blocking)
    except TypeError:
        return data.to(device)


def find_batch_size(data: Any) -> int:
    """Return the length of dim 0 of the first tensor.

    Args:
        data: nested data.

    Raises:
        ValueError: a container is empty, or the tensor has no dimensions.
        TypeError: the first leaf is no tensor.
    """
    if isinstance(data, torch.Tensor):
        if data.ndim == 0:
            raise ValueError("a tensor without dimensions has no batch size")
        return data.shape[0]
    if isinstance(data, (tuple, list, Mapping)):
        for item in data.values() if isinstance(data, Mapping) else data:
            return find_batch_size(item)
        raise ValueError(f"an empty {type(data).__name__} has no batch size")
    if _is_record(data):
        for field in dataclasses.fields(data):
            return find_batch_size(getattr(data, field.name))
    raise TypeError(f"the batch size is found in tensors, not in {type(data).__name__}")


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return the batch size of nested data, None where it has none.

    Args:
        data: see `find_batch_size`.
    """
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Return the same containers with a slice of every tensor.

    Args:
        data: nested data.
        tensor_slice: of dim 0.
        process_index: has no effect; it is for functions that users put in place of this one.
        num_processes: has no effect, as `process_index`.
    """
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate nested data leaf by leaf.

    Args:
        data: items of one structure; a single item may have leaves that are no tensors.
        dim: along which tensors are concatenated.

    Raises:
        TypeError: a leaf is no tensor, and there are several items.
    """
    return combine(functools.partial(_concatenate, dim), data)


def combine(func: Callable[[list[Any]], Any], data: Sequence[Any]) -> Any:
    """Return the same containers with `func(leaves)` in place of the leaves that have the same path.

    Args:
        func: called with a leaf of each item.
        data: items of one structure, which is that of the first one.

    Raises:
        TypeError: their structures differ.
    """
    first = data[0]
    other = next((item for item in data if _structure_of(item) != _structure_of(first)), None)
    if other is not None:
        raise TypeError(f"data of one structure is needed, not {_describe(first)} beside {_describe(other)}")
    if isinstance(first, (tuple, list)):
        return honor_type(first, [combine(func, [item[i] for item in data]) for i in range(len(first))])
    if isinstance(first, Mapping):
        return _like_mapping(first, {key: combine(func, [item[key] for item in data]) for key in first})
    if _is_record(first):
        names = [field.name for field in dataclasses.fields(first)]
        return _like_record(
            first, {name: combine(func, [getattr(item, name) for item in data]) for name in names}
        )
    return func(list(data))


def _structure_of(data: Any) -> Any:
    """Return what the containers at one place of data of one structure have in common."""
    if isinstance(data, torch.Tensor):
        return "leaf"
    if isinstance(data, (tuple, list)):
        return "sequence", len(data)
    if isinstance(data, Mapping):
        return "mapping", set(data)
    return type(data) if _is_record(data) else "leaf"


def _describe(data: Any) -> str:
    if isinstance(data, Mapping):
        return f"a {type(data).__name__} of {list(data)}"
    is_sized = isinstance(data, (tuple, list))
    return f"a {type(data).__name__}{f' of {len(data)} items' if is_sized else ''}"


def _concatenate(dim: int, leaves: list[Any]) -> Any:
    if isinstance(leaves[0], torch.Tensor):
        return torch.cat(leaves, dim=dim)
    if len(leaves) == 1:
        return leaves[0]
    raise TypeError(f"tensors can be concatenated, {type(leaves[0]).__name__} cannot")


def listify(data: Any) -> Any:
    """Return the same containers with the numbers of every tensor, as nested lists.

    Args:
        data: nested data.
    """
    return recursively_apply(lambda tensor: tensor.detach().cpu().tolist(), data)


def convert_to_fp32(tensor: Any) -> Any:
    """Return the same containers with float16 and bfloat16 tensors converted to float32.

    Args:
        tensor: nested data.
    """
    return recursively_apply(_to_float32, tensor, test_type=_is_half)


def _to_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float()


def _is_half(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
