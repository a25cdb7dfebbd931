"""Walk nested data: tuples, lists, named tuples, mappings and dataclasses with tensors as leaves."""

from __future__ import annotations

import copy
import dataclasses
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
    """Make a sequence of the type of `obj` (list, tuple, named tuple or a subclass) of the values."""
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
    made = copy.copy(obj)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def _map(apply: Callable[[Any], Any], data: Any) -> Any:
    """Rebuild the containers of `data` with `apply` called on every leaf, in the order of `flatten`."""
    if isinstance(data, torch.Tensor):
        return apply(data)
    if isinstance(data, (tuple, list)):
        return honor_type(data, [_map(apply, item) for item in data])
    if isinstance(data, Mapping):
        return _like_mapping(data, {key: _map(apply, data[key]) for key in data})
    if _is_record(data):
        return _like_record(
            data, {field.name: _map(apply, getattr(data, field.name)) for field in dataclasses.fields(data)}
        )
    return apply(data)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Predicate = is_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Call `func(leaf, *args, **kwargs)` on every leaf that `test_type` accepts and rebuild the containers around.

    Other leaves stay as they are; with `error_on_other_type` they raise TypeError.
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
        leaves: its leaves, depth first.
    """

    tree: Any
    leaves: list[Any]

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """Return the containers of the tree around other leaves; ValueError unless there are as many."""
        if len(leaves) != len(self.leaves):
            raise ValueError(f"{len(leaves)} leaves given != {len(self.leaves)} leaves of the tree")
        return _refill(self.tree, iter(leaves))

    def paths(self, root: str = "") -> list[str]:
        """Return where each leaf is, as Python would index it: `root['labels'][0].mask`."""
        return list(_paths(self.tree, root))


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of nested data, depth first."""
    leaves: list[Any] = []
    _collect(tree, leaves)
    return leaves


def refill(tree: Any, leaves: Iterable[Any]) -> Any:
    """Return the containers of the tree around other leaves, of which there must be as many."""
    return _refill(tree, iter(leaves))


def flatten(tree: Any) -> Flat:
    """Return the leaves of nested data, what leads to each of them, and how to put other leaves in their place."""
    return Flat(tree=tree, leaves=leaves_of(tree))


def _collect(data: Any, leaves: list[Any]) -> None:
    kind = type(data)
    if kind is torch.Tensor:
        leaves.append(data)
    elif kind is dict:
        for item in data.values():
            _collect(item, leaves)
    elif isinstance(data, (tuple, list)):
        for item in data:
            _collect(item, leaves)
    elif isinstance(data, torch.Tensor):
        leaves.append(data)
    elif isinstance(data, Mapping):
        for key in data:
            _collect(data[key], leaves)
    elif _is_record(data):
        for field in dataclasses.fields(data):
            _collect(getattr(data, field.name), leaves)
    else:
        leaves.append(data)


def _refill(data: Any, leaves: Iterator[Any]) -> Any:
    kind = type(data)
    if kind is torch.Tensor:
        return next(leaves)
    if kind is dict:
        return {key: _refill(item, leaves) for key, item in data.items()}
    if kind is list:
        return [_refill(item, leaves) for item in data]
    if kind is tuple:
        return tuple([_refill(item, leaves) for item in data])
    return _map(lambda _: next(leaves), data)


def _paths(data: Any, here: str) -> Iterator[str]:
    if isinstance(data, (tuple, list)):
        names = [f".{name}" for name in data._fields] if is_namedtuple(data) else []  # type: ignore[union-attr]
        for index, item in enumerate(data):
            yield from _paths(item, here + (names[index] if names else f"[{index}]"))
    elif isinstance(data, Mapping):
        for key in data:
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
    """Move every tensor, and every object with a `to` method, to the device.

    Values of mappings under a key in `skip_keys` stay where they are. `non_blocking` copies from pinned memory
    overlap with computation; a `to` that does not know it is called without.
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
    """Return the length of dim 0 of the first tensor; ValueError for empty containers, TypeError for other leaves."""
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
    """Return the batch size, None where there is none to find."""
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Take the slice of dim 0 of every tensor; the process arguments are for replacements of this function."""
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate nested data of one structure leaf by leaf, the tensors along `dim`.

    A single item is returned as it is where it holds no tensors; other leaves raise TypeError.
    """
    first = data[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(data), dim=dim)
    if isinstance(first, (tuple, list)):
        return honor_type(first, [concatenate([item[i] for item in data], dim) for i in range(len(first))])
    if isinstance(first, Mapping):
        return _like_mapping(first, {key: concatenate([item[key] for item in data], dim) for key in first})
    if _is_record(first):
        names = [field.name for field in dataclasses.fields(first)]
        return _like_record(
            first, {name: concatenate([getattr(item, name) for item in data], dim) for name in names}
        )
    if len(data) == 1:
        return first
    raise TypeError(f"tensors can be concatenated, {type(first).__name__} cannot")


def listify(data: Any) -> Any:
    """Replace every tensor by its numbers, as nested lists."""
    return recursively_apply(lambda tensor: tensor.detach().cpu().tolist(), data)


def convert_to_fp32(tensor: Any) -> Any:
    """Convert float16 and bfloat16 tensors to float32; all else stays."""
    return recursively_apply(_to_float32, tensor, test_type=_is_half)


def _to_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float()


def _is_half(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
