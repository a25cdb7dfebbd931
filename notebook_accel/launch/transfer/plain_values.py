"""Returned values as data only, for nodes that do not know each other: no pickle, so nothing runs while they are read.

A value is JSON, in which memory of tensors and arrays stands for itself as a number of a buffer. Known are None, truth
values, numbers, texts, bytes, lists, tuples, dicts, sets, and tensors, parameters, arrays and numbers of torch and
numpy. Each reader checks sizes before it makes anything.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from ...errors import ShipError
from ...events import Buffer, as_bytes
from ...trust.plain import MalformedError
from ...trust.secret import HOW

_MAX_DEPTH: Final = 100
_MAX_PATH: Final = 60
_MAX_INTEGER: Final = 1 << 63
_SEQUENCES: Final[Mapping[type, str]] = {
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    torch.Size: "size",
}
_BYTES: Final[Mapping[type, str]] = {bytes: "bytes", bytearray: "bytearray"}
_DTYPES: Final[Mapping[str, torch.dtype]] = {
    name: kind
    for name, kind in vars(torch).items()
    if isinstance(kind, torch.dtype)
    and re.fullmatch(r"bool|u?int(8|16|32|64)|b?float(16|32|64)|complex\d+|float8_\w+", name)
}
_ARRAY_DTYPE: Final = re.compile(r"[<>|=][biufcSUMm]\d{1,9}(\[\d{0,9}[a-zA-Z]{1,2}\])?", re.ASCII)
Buffers: TypeAlias = dict[int, memoryview]


def pack_plain(value: Any, limit: float) -> list[Buffer]:
    """Return a value as parts: the JSON, and the buffers that it refers to.

    Args:
        value: what a rank returned.
        limit: bytes of all parts together.

    Raises:
        ShipError: it has something that is no data, or is too large; the message names the part and the secret.
    """
    buffers: list[Buffer] = []
    tree = json.dumps(_write(value, "the returned value", buffers, 0)).encode()
    size = len(tree) + sum(memoryview(buffer).nbytes for buffer in buffers)
    if size > limit:
        raise ShipError(
            f"the returned value has {size / 2**30:.1f} GiB, and nodes without a secret take {limit / 2**30:g} GiB at "
            f"most from each other: {HOW}"
        )
    return [tree, *buffers]


def unpack_plain(parts: Sequence[Buffer]) -> Any:
    """Make a value again.

    Args:
        parts: what `pack_plain` returned, or what somebody made up.

    Raises:
        MalformedError: they are no value.
    """
    try:
        tree = json.loads(bytes(parts[0]))
        return _read(tree, dict(enumerate(map(as_bytes, parts[1:]))))
    # RecursionError is a RuntimeError, and torch raises these
    except (ValueError, TypeError, LookupError, OverflowError, RuntimeError) as error:
        raise MalformedError(f"a returned value cannot be read: {error}") from None


def _write(value: Any, path: str, buffers: list[Buffer], depth: int) -> Any:
    """Return a value for JSON: what JSON has stands for itself, all else is a list that begins with a name."""
    kind = type(value)
    if value is None or kind in (bool, str, float) or (kind is int and abs(value) < _MAX_INTEGER):
        return value
    if depth > _MAX_DEPTH:
        where = path if len(path) <= _MAX_PATH else f"{path[:_MAX_PATH]}..."
        raise ShipError(
            f"{where} cannot be sent to the other nodes: it is nested too deeply, {_MAX_DEPTH} values in each "
            "other are the most"
        )
    if kind in _SEQUENCES:
        parts = [_write(each, f"{path} -> [{i}]", buffers, depth + 1) for i, each in enumerate(value)]
        return [_SEQUENCES[kind], parts]
    if kind is dict:
        return ["dict", _write_pairs(value, path, buffers, depth)]
    if kind is OrderedDict:
        versions = getattr(value, "_metadata", None)  # of a state dict
        notes = _write(versions, f"{path} -> _metadata", buffers, depth + 1)
        return ["ordered dict", _write_pairs(value, path, buffers, depth), notes]
    if (written := _write_leaf(value, buffers)) is not None:
        return written
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    raise ShipError(
        f"{path} cannot be sent to the other nodes: it is a {name}, and nodes without a secret exchange data only "
        "(numbers, texts, tensors, arrays, and lists, tuples, dicts and sets of them). Return such data, or "
        f"{HOW}."
    )


def _write_pairs(value: Mapping[Any, Any], path: str, buffers: list[Buffer], depth: int) -> list[Any]:
    return [
        [
            _write(key, f"{path} -> a key", buffers, depth + 1),
            _write(each, f"{path} -> [{key!r}]", buffers, depth + 1),
        ]
        for key, each in value.items()
    ]


def _write_leaf(value: Any, buffers: list[Buffer]) -> list[Any] | None:
    """Return what has no parts for JSON; None of what cannot be written."""
    kind = type(value)
    if kind is int:
        return ["int", hex(value)]
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind in _BYTES:
        return [_BYTES[kind], _add(value, buffers)]
    if kind is torch.dtype and _name_dtype(value) in _DTYPES:
        return ["dtype", _name_dtype(value)]
    if kind is torch.device:
        return ["device", str(value)]
    if kind in (torch.Tensor, torch.nn.Parameter):
        return _write_tensor(value, buffers)
    if isinstance(value, np.str_):  # as an array it would lose zeros at its end
        return ["numpy text", str.__str__(value)]
    if isinstance(value, np.bytes_):
        return ["numpy bytes", _add(bytes(value), buffers)]
    if kind is np.ndarray or isinstance(value, np.generic):
        array = np.asarray(value)
        if _ARRAY_DTYPE.fullmatch(array.dtype.str):
            number = _add(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, buffers)
            return ["array", array.dtype.str, list(array.shape), kind is np.ndarray, number]
    return None


def _add(data: Buffer, buffers: list[Buffer]) -> int:
    buffers.append(data)
    return len(buffers) - 1


def _name_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _write_tensor(tensor: torch.Tensor, buffers: list[Buffer]) -> list[Any] | None:
    name = _name_dtype(tensor.dtype)
    if name not in _DTYPES or tensor.is_nested or tensor.layout is not torch.strided or tensor.is_meta:
        return None
    if vars(tensor):
        return None
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    number = _add(flat.view(torch.uint8).numpy().data, buffers)
    requires_grad = tensor.requires_grad and tensor.is_leaf
    return ["tensor", name, list(tensor.shape), requires_grad, type(tensor) is torch.nn.Parameter, number]


def _read(tree: Any, buffers: Buffers) -> Any:
    if isinstance(tree, list):
        name, *rest = tree
        return _READERS[name](buffers, *rest)
    if isinstance(tree, dict):
        raise TypeError("a dict has another form")
    return tree


def _read_all(parts: list[Any], buffers: Buffers) -> list[Any]:
    if not isinstance(parts, list):
        raise TypeError("a list is needed")
    return [_read(part, buffers) for part in parts]


def _read_pairs(pairs: list[Any], buffers: Buffers) -> dict[Any, Any]:
    return {_read(key, buffers): _read(value, buffers) for key, value in pairs}


def _read_ordered(buffers: Buffers, pairs: list[Any], notes: Any) -> OrderedDict[Any, Any]:
    made = OrderedDict(_read_pairs(pairs, buffers))
    if notes is not None:
        vars(made)["_metadata"] = _read(notes, buffers)
    return made


def _read_tensor(
    buffers: Buffers, name: str, shape: list[int], requires_grad: bool, is_parameter: bool, number: int
) -> torch.Tensor:
    tensor = torch.from_numpy(_take_array(buffers, number)).view(_DTYPES[name]).reshape(shape)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=bool(requires_grad))
    return tensor.requires_grad_(bool(requires_grad))


def _read_array(buffers: Buffers, name: str, shape: list[int], is_array: bool, number: int) -> Any:
    if not _ARRAY_DTYPE.fullmatch(name):
        raise ValueError(f"{name!r} is no dtype")
    array = _take_array(buffers, number).view(np.dtype(name)).reshape(shape)
    return array if is_array else array[()]


def _take_array(buffers: Buffers, number: int) -> np.ndarray:
    """Return the bytes of a buffer as an array that may be written to."""
    data = _take(buffers, number)
    return np.frombuffer(bytearray(data) if data.readonly else data, np.uint8)


def _take(buffers: Buffers, number: int) -> memoryview:
    """Return a buffer, once: a few bytes of JSON could make any number of copies."""
    return buffers.pop(number)


_READERS: Final[Mapping[str, Callable[..., Any]]] = {
    "list": lambda buffers, parts: _read_all(parts, buffers),
    "tuple": lambda buffers, parts: tuple(_read_all(parts, buffers)),
    "set": lambda buffers, parts: set(_read_all(parts, buffers)),
    "frozenset": lambda buffers, parts: frozenset(_read_all(parts, buffers)),
    "size": lambda buffers, parts: torch.Size(_read_all(parts, buffers)),
    "dict": lambda buffers, pairs: _read_pairs(pairs, buffers),
    "ordered dict": _read_ordered,
    "int": lambda buffers, text: int(text, 16),
    "complex": lambda buffers, real, imag: complex(real, imag),
    "numpy text": lambda buffers, text: np.str_(text),
    "numpy bytes": lambda buffers, number: np.bytes_(bytes(_take(buffers, number))),
    "bytes": lambda buffers, number: bytes(_take(buffers, number)),
    "bytearray": lambda buffers, number: bytearray(_take(buffers, number)),
    "dtype": lambda buffers, name: _DTYPES[name],
    "device": lambda buffers, name: torch.device(name),
    "tensor": _read_tensor,
    "array": _read_array,
}
