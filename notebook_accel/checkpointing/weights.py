"""Weights in safetensors files: written straight from the tensors, read straight into them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from ..errors import CheckpointError
from . import rawio

# https://github.com/huggingface/safetensors#format
_CODES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES: Final = {code: dtype for dtype, code in _CODES.items()}
_MAX_HEADER: Final = 100_000_000
_ALIGNMENT: Final = 64  # so that most tensors can be used where they lie in a mapped file


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A tensor in a file: it starts at byte `offset`."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What a file holds: its tensors by name, and its texts by name."""

    entries: dict[str, Entry]
    texts: dict[str, str]


def check_values(state: Mapping[str, Any]) -> None:
    """Raise ValueError if a tensor has no values."""
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
            raise ValueError(f"{name!r} is on the meta device and has no values to save: load weights first")


def without_ties(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors with one name each, and the name kept for every name left out.

    ValueError names an entry that is no tensor, which these files cannot hold.
    """
    check_values(state)
    kept: dict[str, torch.Tensor] = {}
    dropped: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            raise ValueError(
                f"{name!r} is a {type(tensor).__name__}, and safetensors files hold dense tensors only: "
                "use safe_serialization=False"
            )
        if tensor.dtype not in _CODES:
            raise ValueError(
                f"{name!r} is of {tensor.dtype}, unknown to safetensors: use safe_serialization=False"
            )
        view = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        first = seen.setdefault(view, name) if tensor.nbytes else name
        if first == name:
            kept[name] = tensor
        else:
            dropped[name] = first
    return kept, dropped


def write(path: Path, tensors: Mapping[str, torch.Tensor], texts: Mapping[str, str]) -> None:
    """Write a safetensors file; it is on the disk afterwards.

    Args:
        path: of the file.
        tensors: by name, of any device; no two of them share memory.
        texts: for the header: for each name that was left out, the name with the same values.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    head: dict[str, Any] = {"__metadata__": {"format": "pt", **texts}}
    at = 0
    for name in order:
        tensor = tensors[name]
        span = [at, at + tensor.nbytes]
        head[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        at += tensor.nbytes
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with rawio.create(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(rawio.memory(_plain(tensors[name])))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with its values in memory as they are, not yet to be conjugated or negated."""
    return tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()


def read_header(path: Path) -> Header:
    """Return what the file holds; CheckpointError if it is missing, cut off, or no safetensors file."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _MAX_HEADER):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            head = json.loads(file.read(length))
        texts = head.pop("__metadata__", {})
        entries, end = {}, 0
        for name, item in head.items():
            entry, stop = _entry(name, item, 8 + length)
            entries[name] = entry
            end = max(end, stop)
        if max(end, 8 + length) != size:
            raise ValueError(f"its tensors end at byte {max(end, 8 + length)}, the file at {size}")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is cut off or no safetensors file: {error}") from error
    return Header(entries=entries, texts={str(key): str(text) for key, text in texts.items()})


def _entry(name: str, item: dict[str, Any], base: int) -> tuple[Entry, int]:
    start, stop = item["data_offsets"]
    if item["dtype"] not in _DTYPES:
        raise ValueError(f"{name!r} is of unknown dtype {item['dtype']!r}")
    entry = Entry(offset=base + start, shape=tuple(item["shape"]), dtype=_DTYPES[item["dtype"]])
    count = 1
    for length in entry.shape:
        count *= length
    if not 0 <= start <= stop or count * entry.dtype.itemsize != stop - start:
        raise ValueError(f"{name!r} of shape {list(entry.shape)} does not fill bytes {start} to {stop}")
    return entry, base + stop


def read(path: Path, header: Header | None = None) -> dict[str, torch.Tensor]:
    """Return all tensors of a safetensors file, on the CPU.

    Args:
        path: of the file.
        header: what `read_header` returned, where it is known.
    """
    header = header or read_header(path)
    tensors = {
        name: torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        for name, entry in header.entries.items()
    }
    rawio.read_at(path, [(header.entries[name].offset, tensor) for name, tensor in tensors.items()])
    return tensors
