"""Weights in safetensors files with checksums: written straight from the tensors, read straight into them."""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from ..errors import CheckpointError
from . import checksums, rawio

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
_MAX_COUNT: Final = 1 << 56  # of values: torch counts bytes with 64 bits
_CHECKSUMS: Final = "notebook_accel.checksums"
# Other libraries may copy our checksums to a file of other values, but they write no space here.
_OURS: Final = b'{ "__metadata__"'
_ALIGNMENT: Final = 64  # so that most tensors can be used where they lie in a mapped file


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A tensor in a file: it starts at byte `offset`; files of others have no checksums."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    checksum: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What a file holds.

    Attributes:
        entries: its tensors by name.
        texts: by name.
        checksum: of the header, in which the tensors' checksums are; empty in files of others.
    """

    entries: dict[str, Entry]
    texts: dict[str, str]
    checksum: str = ""


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


def write(path: Path, tensors: Mapping[str, torch.Tensor], texts: Mapping[str, str]) -> checksums.Written:
    """Write a safetensors file with checksums in its header; it is on the disk afterwards.

    Args:
        path: of the file.
        tensors: by name, of any device; no two of them share memory.
        texts: for the header: for each name that was left out, the name with the same values.

    Returns:
        The size, and the checksum of the header.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    sums: list[int] = []
    with rawio.create(path) as file:
        file.write(_header({name: tensors[name] for name in order}, texts, [0] * len(order)))
        for name in order:
            values = rawio.memory(_plain(tensors[name]))
            sums.append(checksums.compute(values))
            file.write(values)
    header = _header({name: tensors[name] for name in order}, texts, sums)
    with open(path, "r+b") as file:
        file.write(header)
        file.flush()
        os.fsync(file.fileno())
    size = len(header) + sum(tensor.nbytes for tensor in tensors.values())
    return checksums.Written(size, _field_of(header)[: checksums.DIGITS])


def _field_of(header: bytes) -> str:
    """Return the checksums in a header that was just made, its own in front."""
    return str(json.loads(header[8:])["__metadata__"][_CHECKSUMS])


def _header(tensors: Mapping[str, torch.Tensor], texts: Mapping[str, str], sums: Sequence[int]) -> bytes:
    """Return the bytes in front of the values; checksums do not change how many they are.

    Args:
        tensors: in the order of the file.
        texts: see `write`.
        sums: of the tensors.
    """
    field = "".join(map(checksums.show, (0, *sums)))
    head: dict[str, Any] = {"__metadata__": {_CHECKSUMS: field, "format": "pt", **texts}}
    at = 0
    for name, tensor in tensors.items():
        span = [at, at + tensor.nbytes]
        head[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        at += tensor.nbytes
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
    text = _OURS[:2] + text[1:]
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    own = checksums.show(zlib.crc32(text)).encode()
    return len(text).to_bytes(8, "little") + text.replace(b"0" * checksums.DIGITS, own, 1)


def _checksums(text: bytes, field: str | None, count: int) -> list[int] | None:
    """Return the tensors' checksums; None for a file of others, ValueError where the header has changed.

    Args:
        text: of the header.
        field: the checksums in it, its own in front.
        count: of tensors.
    """
    if not text.startswith(_OURS):
        return None
    numbers = [str(field)[at : at + checksums.DIGITS] for at in range(0, len(str(field)), checksums.DIGITS)]
    unsigned = text.replace("".join(numbers[:1]).encode(), b"0" * checksums.DIGITS, 1)
    if len(numbers) != count + 1 or int(numbers[0], 16) != zlib.crc32(unsigned):
        raise ValueError("its header is not the one that was written")
    return [int(number, 16) for number in numbers[1:]]


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
            head = json.loads(text := file.read(length))
        texts = head.pop("__metadata__", {})
        field = texts.pop(_CHECKSUMS, None)
        known = _checksums(text, field, len(head))
        sums: Sequence[int | None] = [None] * len(head) if known is None else known
        entries, end = {}, 0
        for (name, item), checksum in zip(head.items(), sums, strict=True):
            entry, stop = _entry(name, item, 8 + length, checksum)
            entries[name] = entry
            end = max(end, stop)
        if max(end, 8 + length) != size:
            raise ValueError(f"its tensors end at byte {max(end, 8 + length)}, the file at {size}")
        if sum(entry.nbytes for entry in entries.values()) != size - 8 - length:
            raise ValueError("its tensors overlap, or leave bytes between them")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is cut off or no safetensors file: {error}") from error
    own = "" if known is None else str(field)[: checksums.DIGITS]
    return Header(entries=entries, texts={str(key): str(text) for key, text in texts.items()}, checksum=own)


def _entry(name: str, item: dict[str, Any], base: int, checksum: int | None) -> tuple[Entry, int]:
    start, stop = item["data_offsets"]
    numbers = [start, stop, *item["shape"]]
    largest = math.prod(number for number in item["shape"] if number)
    if not all(type(number) is int and number >= 0 for number in numbers) or largest > _MAX_COUNT:
        raise ValueError(f"{name!r} has no legal shape and place")
    if item["dtype"] not in _DTYPES:
        raise ValueError(f"{name!r} is of unknown dtype {item['dtype']!r}")
    entry = Entry(
        offset=base + start, shape=tuple(item["shape"]), dtype=_DTYPES[item["dtype"]], checksum=checksum
    )
    if start > stop or entry.nbytes != stop - start:
        raise ValueError(f"{name!r} of shape {list(entry.shape)} does not fill bytes {start} to {stop}")
    return entry, base + stop


def read(path: Path, header: Header | None = None) -> dict[str, torch.Tensor]:
    """Return all tensors of a safetensors file, on the CPU.

    Args:
        path: of the file.
        header: what `read_header` returned, where it is known.

    Raises:
        CheckpointError: the file is damaged.
    """
    header = header or read_header(path)
    tensors = {
        name: torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        for name, entry in header.entries.items()
    }
    read_into(path, header, tensors)
    return tensors


def read_into(
    path: Path, header: Header, targets: Mapping[str, torch.Tensor], verified: Collection[str] = ()
) -> None:
    """Fill tensors with the values of these names, and compare checksums on the way.

    Args:
        path: of the file.
        header: what `read_header` returned.
        targets: contiguous CPU tensors, of the shapes and dtypes in the file.
        verified: names that need no comparison, see `verify`.

    Raises:
        CheckpointError: values are not those that were written.
    """
    checked: dict[str, rawio.Piece] = {}
    others: list[rawio.Piece] = []
    for name, tensor in targets.items():
        entry = header.entries[name]
        if entry.checksum is None or name in verified:
            others.append((entry.offset, tensor))
        else:
            checked[name] = (entry.offset, tensor)
    rawio.read_at(path, others)
    _compare(path, header, list(checked), checksums.read_into(path, list(checked.values())))


def verify(path: Path, header: Header, names: Iterable[str]) -> None:
    """Compare checksums before anything is read into tensors that are in use.

    Args:
        path: of the file.
        header: what `read_header` returned.
        names: of tensors.

    Raises:
        CheckpointError: values are not those that were written.
    """
    known = [name for name in names if header.entries[name].checksum is not None]
    spans = [(header.entries[name].offset, header.entries[name].nbytes) for name in known]
    _compare(path, header, known, checksums.compute_at(path, spans))


def _compare(path: Path, header: Header, names: Sequence[str], found: Sequence[int]) -> None:
    for name, checksum in zip(names, found, strict=True):
        if checksum != header.entries[name].checksum:
            raise CheckpointError(
                f"{path}: the values of {name!r} are not those that were written (checksum {checksum:08x}, written "
                f"with {header.entries[name].checksum:08x}): the file is damaged, load another checkpoint"
            )
