"""Returned values as data only, for nodes that do not know each other: no pickle, so nothing runs while they are read.

A value is JSON, in which memory of tensors and arrays stands for itself as a number of a buffer. Known are None, truth
values, numbers, texts, bytes, lists, tuples, dicts, sets, and tensors, parameters, arrays and numbers of torch and
numpy. Each reader checks sizes before it makes anything.
"""

from __future__ import annotations

import base64
import json
import math
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
_DTYPES: Final[Mapping[str, torch.dtype]] = {
    name: kind
    for name, kind in vars(torch).items()
    if isinstance(kind, torch.dtype)
    and re.fullmatch(r"bool|u?int(8|16|32|64)|b?float(16|32|64)|complex\d+|float8_\w+", name)
}
Buffers: TypeAlias = list[memoryview | None]
_NESTED: Final = (list, tuple, set, frozenset, torch.Size, dict, OrderedDict)
_ARRAY_DTYPE: Final = re.compile(r"[<>|=][biufcSUMm]\d{1,9}(\[\d{0,9}[a-zA-Z]{1,2}\])?", re.ASCII)


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
        return _read(tree, [as_bytes(part) for part in parts[1:]])
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        OverflowError,
        RecursionError,
        RuntimeError,
    ) as error:
        raise MalformedError(f"a returned value cannot be read: {error}") from None


def _write(value: Any, path: str, buffers: list[Buffer], depth: int) -> Any:
    """Return a value for JSON: what JSON has stands for itself, all else is a list that begins with a name."""
    kind = type(value)
    if value is None or kind in (bool, str, float) or (kind is int and abs(value) < _MAX_INTEGER):
        return value
    if kind in _NESTED:
        if depth == _MAX_DEPTH:
            where = path if len(path) <= _MAX_PATH else f"{path[:_MAX_PATH]}..."
            raise ShipError(
                f"{where} cannot be sent to the other nodes: it is nested too deeply, {_MAX_DEPTH} values in each "
                "other are the most"
            )
        if kind in (list, tuple, set, frozenset, torch.Size):
            parts = [_write(each, f"{path} -> [{i}]", buffers, depth + 1) for i, each in enumerate(value)]
            return [_NAMES[kind], parts]
        if kind in (dict, OrderedDict) and not getattr(value, "__dict__", None):
            return [_NAMES[kind], _write_pairs(value, path, buffers, depth)]
        if kind is OrderedDict:  # a state dict has notes of versions
            more = _write_pairs(vars(value), path, buffers, depth)
            return ["state dict", _write_pairs(value, path, buffers, depth), more]
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
    if kind in (bytes, bytearray):
        buffers.append(value)
        return [_NAMES[kind], len(buffers) - 1]
    if kind is torch.dtype and str(value).removeprefix("torch.") in _DTYPES:
        return ["dtype", str(value).removeprefix("torch.")]
    if kind is torch.device:
        return ["device", str(value)]
    if kind in (torch.Tensor, torch.nn.Parameter):
        return _write_tensor(value, buffers)
    if isinstance(value, np.str_):
        return ["numpy text", str.__str__(value)]  # numpy's own leaves out zeros at the end
    if isinstance(value, np.bytes_):
        buffers.append(bytes(value))
        return ["numpy bytes", len(buffers) - 1]
    if isinstance(value, np.generic) and _ARRAY_DTYPE.fullmatch(value.dtype.str):
        return ["numpy number", value.dtype.str, base64.b64encode(value.tobytes()).decode()]
    if kind is np.ndarray and _ARRAY_DTYPE.fullmatch(value.dtype.str):
        buffers.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        return ["array", value.dtype.str, list(value.shape), len(buffers) - 1]
    return None


def _write_tensor(tensor: torch.Tensor, buffers: list[Buffer]) -> list[Any] | None:
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout is not torch.strided or name not in _DTYPES or tensor.is_quantized or tensor.__dict__:
        return None
    if (
        tensor.device.type == "meta"
        or tensor.is_nested
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    ):
        return None
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    buffers.append(flat.view(torch.uint8).numpy().data)
    requires_grad = tensor.requires_grad and tensor.is_leaf
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return ["tensor", name, list(tensor.shape), requires_grad, is_parameter, len(buffers) - 1]


def _read(tree: Any, buffers: Buffers) -> Any:
    if not isinstance(tree, list):
        if isinstance(tree, dict):
            raise TypeError("a dict has another form")
        return tree
    name, *rest = tree
    return _READERS[name](buffers, *rest)


def _read_all(parts: list[Any], buffers: Buffers) -> list[Any]:
    if not isinstance(parts, list):
        raise TypeError("a list is needed")
    return [_read(part, buffers) for part in parts]


def _read_pairs(pairs: list[Any], buffers: Buffers) -> dict[Any, Any]:
    return {_read(key, buffers): _read(value, buffers) for key, value in pairs}


def _read_state_dict(buffers: Buffers, pairs: list[Any], more: list[Any]) -> OrderedDict[Any, Any]:
    made = OrderedDict(_read_pairs(pairs, buffers))
    if notes := {
        str(name): value for name, value in _read_pairs(more, buffers).items() if name == "_metadata"
    }:
        vars(made).update(notes)
    return made


def _read_integer(buffers: Buffers, text: str) -> int:
    return int(text, 16)


def _read_tensor(
    buffers: Buffers, name: str, shape: list[int], requires_grad: bool, is_parameter: bool, number: int
) -> torch.Tensor:
    dtype, data = _DTYPES[name], _take(buffers, number)
    _check_size(shape, dtype.itemsize, data)
    flat = (
        torch.frombuffer(_own(data), dtype=torch.uint8) if data.nbytes else torch.empty(0, dtype=torch.uint8)
    )
    tensor = (flat != 0 if dtype is torch.bool else flat.view(dtype)).reshape(shape)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=bool(requires_grad))
    return tensor.requires_grad_() if requires_grad else tensor


def _read_array(buffers: Buffers, name: str, shape: list[int], number: int) -> np.ndarray:
    data = _take(buffers, number)
    return _make_array(name, shape, _own(data), data)


def _read_number(buffers: Buffers, name: str, text: str) -> np.generic:
    data = base64.b64decode(text, validate=True)
    return _make_array(name, [1], bytearray(data), memoryview(data))[0]  # type: ignore[no-any-return]


def _read_text(buffers: Buffers, text: str) -> np.str_:
    if not isinstance(text, str):
        raise TypeError("a text is needed")
    return np.str_(text)


def _make_array(name: str, shape: list[int], memory: bytearray | memoryview, data: memoryview) -> np.ndarray:
    if not _ARRAY_DTYPE.fullmatch(name):
        raise ValueError(f"{name!r} is no dtype")
    dtype = np.dtype(name)
    if not dtype.itemsize:
        raise ValueError(f"{name!r} has no size")
    _check_size(shape, dtype.itemsize, data)
    if not data.nbytes:
        return np.empty(shape, dtype)
    flat = np.frombuffer(memory, np.uint8)
    return (flat != 0 if dtype.kind == "b" else flat.view(dtype)).reshape(shape)


def _take(buffers: Buffers, number: int) -> memoryview:
    """Return a buffer, once: a few bytes of JSON could make any number of copies."""
    if type(number) is not int or number < 0:
        raise TypeError("a buffer's number is needed")
    found, buffers[number] = buffers[number], None
    if found is None:
        raise ValueError("a buffer is used twice")
    return found


def _check_size(shape: list[int], itemsize: int, data: memoryview) -> None:
    if not isinstance(shape, list) or not all(
        type(size) is int and 0 <= size < _MAX_INTEGER for size in shape
    ):
        raise TypeError("a shape is needed")
    if len(shape) > 64 or math.prod(shape) * itemsize != data.nbytes:
        raise ValueError(f"{data.nbytes} bytes for a shape of {shape[:64]}")


def _own(data: memoryview) -> bytearray | memoryview:
    """Return memory that may be written to."""
    return bytearray(data) if data.readonly else data


_NAMES: Final[Mapping[type, str]] = {
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    torch.Size: "size",
    dict: "dict",
    OrderedDict: "ordered dict",
    bytes: "bytes",
    bytearray: "bytearray",
}
_READERS: Final[Mapping[str, Callable[..., Any]]] = {
    "list": lambda buffers, parts: _read_all(parts, buffers),
    "tuple": lambda buffers, parts: tuple(_read_all(parts, buffers)),
    "set": lambda buffers, parts: set(_read_all(parts, buffers)),
    "frozenset": lambda buffers, parts: frozenset(_read_all(parts, buffers)),
    "size": lambda buffers, parts: torch.Size(_read_all(parts, buffers)),
    "dict": lambda buffers, pairs: _read_pairs(pairs, buffers),
    "ordered dict": lambda buffers, pairs: OrderedDict(_read_pairs(pairs, buffers)),
    "state dict": _read_state_dict,
    "int": _read_integer,
    "complex": lambda buffers, real, imag: complex(real, imag),
    "bytes": lambda buffers, number: bytes(_take(buffers, number)),
    "bytearray": lambda buffers, number: bytearray(_take(buffers, number)),
    "dtype": lambda buffers, name: _DTYPES[name],
    "device": lambda buffers, name: torch.device(name),
    "tensor": _read_tensor,
    "array": _read_array,
    "numpy number": _read_number,
    "numpy text": _read_text,
    "numpy bytes": lambda buffers, number: np.bytes_(bytes(_take(buffers, number))),
}
