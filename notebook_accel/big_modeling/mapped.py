"""Tensors whose values are pages of a file: the system reads them when they are used, and may drop them again.

Where such a file is cut off, the system ends the process that uses pages beyond the new end, by SIGBUS; what is left of
the last page reads as zeros. Therefore `read` compares the file's size and time of change with those of the loading
before and after it maps the file, and `check` does so before and after a module computes. What remains is a file that
is cut off, or a disk that fails, while a module computes or values are copied: the process may end, or the check
afterwards finds it. A file that gets another
name, or is replaced by a rename, keeps its pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..checkpointing import rawio
from ..errors import CheckpointError

_ALIGNMENT: Final = 64
# Kernels of matrix products add up in another order at other addresses: the last bits of a result would depend on
# the position of a weight in its file.
_LARGE: Final = 1 << 20
_NORESERVE: Final = 0x4000  # Linux's; Python knows it from 3.11 on
# man 2 madvise
_WILLNEED: Final = 3
_HUGEPAGE: Final = 14
_POPULATE_READ: Final = 22  # from Linux 5.14 on


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where the values of a tensor are in a file, one after the other.

    Attributes:
        path: the file.
        offset: bytes before the first value.
        shape: of the tensor.
        dtype: of the tensor.
        stamp: of the file when this was looked up, see `read_stamp`; None reads whatever is there.
        checksum: of the values, where it is known.
    """

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    stamp: tuple[int, int] | None = None
    checksum: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def read_stamp(path: str | Path) -> tuple[int, int]:
    """Return the size and the time of the last change of a file, in bytes and ns: they change when it is written again.

    Args:
        path: the file.
    """
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns


def check(files: Iterable[tuple[str, tuple[int, int] | None]]) -> None:
    """Raise CheckpointError if one of these files has not the stamp beside it any more."""
    for path, stamp in files:
        try:
            _check_stamp(path, stamp)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be used any more: {error}") from error


def _check_stamp(path: str | Path, stamp: tuple[int, int] | None) -> None:
    if stamp is not None and (now := read_stamp(path)) != stamp:
        raise OSError(
            f"it was written again after the model was loaded, it has {now[0]:,} bytes now: load the model again"
        )


class Rooms:
    """Memory for copies of values. The system clears what it gives, so what tensors have left is used again.

    It keeps no more than its tensors had at one time, until it is gone itself. Memory of malloc may stay longer: each
    thread keeps some.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: list[tuple[mmap.mmap, StorageWeakRef]] = []
        self._most = 0  # bytes that tensors had at one time

    def __reduce__(self) -> tuple[type[Rooms], tuple[()]]:
        return Rooms, ()

    def make(self, place: Place) -> torch.Tensor:
        """Return a tensor for values of a file; those that it has are of no meaning.

        Args:
            place: of the values.
        """
        if place.nbytes < _LARGE:
            return torch.empty(place.shape, dtype=place.dtype, device="cpu")
        with self._lock:
            left = self._take_left(place.nbytes)
            pages = left or mmap.mmap(-1, place.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            made = torch.frombuffer(pages, dtype=torch.uint8).view(place.dtype).view(place.shape)
            self._known.append((pages, StorageWeakRef(made.untyped_storage())))
        if left is None:
            ask_for_large_pages(made)
        return made

    def _take_left(self, nbytes: int) -> mmap.mmap | None:
        """Return memory of this size that no tensor has any more; None, and room for it, where there is none."""
        is_free = [known[1].expired() for known in self._known]
        free = [known for known, left in zip(self._known, is_free, strict=True) if left]
        used = [known for known, left in zip(self._known, is_free, strict=True) if not left]
        now = nbytes + sum(len(pages) for pages, _ in used)
        self._most = max(self._most, now)
        fitting = next((known for known in free if len(known[0]) == nbytes), None)
        if fitting is not None:
            free.remove(fitting)
        while free and now + sum(len(pages) for pages, _ in free) > self._most:
            free.pop(0)
        self._known = used + free
        return None if fitting is None else fitting[0]


def is_cached(places: Iterable[Place]) -> bool:
    """Return whether the system has these values in its cache: a byte of each MiB is read if it need not wait for it.

    Args:
        places: of the values.
    """
    if sys.platform != "linux":
        return False
    by_path: dict[Path, list[Place]] = {}
    for place in places:
        by_path.setdefault(place.path, []).append(place)
    byte = [bytearray(1)]
    try:
        for path, here in by_path.items():
            with open(path, "rb", buffering=0) as file:
                for place in here:
                    for start in range(0, place.nbytes, _LARGE):
                        os.preadv(file.fileno(), byte, place.offset + start, os.RWF_NOWAIT)
    except (
        OSError
    ):  # it would have to wait; or the file system does not tell; or `read` will say what is wrong
        return False
    return True


def read(
    places: Mapping[str, Place], *, aligned: bool = True, beside: bool = False, rooms: Rooms | None = None
) -> dict[str, torch.Tensor]:
    """Return tensors with the values at these places.

    A tensor is the mapped file itself where its address allows that; writes to it never reach the file. The others are
    copies. A mapping ends with the last tensor of this call that uses it.

    Args:
        places: by name.
        aligned: False where no kernel of the CPU computes with the tensors: any address of their type will do then.
        beside: whether a module computes meanwhile, with the threads of torch; else these copy.
        rooms: have memory for the copies; None takes new memory.

    Raises:
        CheckpointError: a file cannot be read, or changed since its places were looked up.
    """
    found: dict[str, torch.Tensor] = {}
    for path in dict.fromkeys(place.path for place in places.values()):
        here = {name: place for name, place in places.items() if place.path == path}
        try:
            found |= _read_file(path, here, aligned, beside, rooms or Rooms())
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read for {', '.join(here)}: {error}") from error
    return found


def _read_file(
    path: Path, places: Mapping[str, Place], aligned: bool, beside: bool, rooms: Rooms
) -> dict[str, torch.Tensor]:
    stamps = {place.stamp for place in places.values()}
    for stamp in stamps:
        _check_stamp(path, stamp)
    found: dict[str, torch.Tensor] = {}
    copied: list[rawio.Piece] = []
    mapped: dict[str, Place] = {}
    large: dict[str, Place] = {}
    for name, place in places.items():
        if place.nbytes and place.offset % (_ALIGNMENT if aligned else place.dtype.itemsize) == 0:
            mapped[name] = place
            continue
        found[name] = rooms.make(place)
        if place.nbytes < _LARGE or beside:
            copied.append((place.offset, found[name]))
        else:
            large[name] = place
    rawio.read_at(path, copied, cached=True)
    if mapped:
        found |= {
            name: values.view(mapped[name].dtype).view(mapped[name].shape)
            for name, values in _map(path, mapped, _WILLNEED, _POPULATE_READ).items()
        }
    if large:
        _copy(path, large, found)
    for stamp in stamps:
        _check_stamp(path, stamp)
    return found


def _copy(path: Path, places: Mapping[str, Place], found: Mapping[str, torch.Tensor]) -> None:
    """Fill tensors from a file by the threads of torch: a kernel has just used them, and they keep their cores busy."""
    try:
        pages = _map(path, places, _WILLNEED)
    except OSError:  # the file system has no mappings; or the file is too short, which reading says too
        rawio.read_at(path, [(place.offset, found[name]) for name, place in places.items()], cached=True)
        return
    for name, values in pages.items():
        found[name].view(-1).view(torch.uint8).copy_(values)


def ask_for_large_pages(tensor: torch.Tensor) -> None:
    """Tell the system that new memory may be in large pages, which fill three times as fast.

    Args:
        tensor: on the CPU, not written yet.
    """
    if tensor.nbytes >= _LARGE:
        _advise(tensor, _HUGEPAGE)


def _map(path: Path, places: Mapping[str, Place], *advices: int) -> dict[str, torch.Tensor]:
    """Return the bytes at these places, which are pages of the file; tell the system what they are for."""
    first = min(place.offset for place in places.values())
    start = first // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    end = max(place.offset + place.nbytes for place in places.values())
    with open(path, "rb") as file:
        if file.seek(0, 2) < end:
            raise OSError(f"it has {file.tell()} bytes, and values lie up to byte {end}")
        # by default the system counts such memory as used, and refuses more than it has; with NORESERVE it does not,
        # as little of it will be written
        flags = mmap.MAP_PRIVATE | getattr(
            mmap, "MAP_NORESERVE", _NORESERVE if sys.platform == "linux" else 0
        )
        pages = mmap.mmap(file.fileno(), end - start, flags, mmap.PROT_READ | mmap.PROT_WRITE, offset=start)
    found: dict[str, torch.Tensor] = {}
    for name, place in places.items():
        values = torch.frombuffer(pages, dtype=torch.uint8, count=place.nbytes, offset=place.offset - start)
        found[name] = values
        _advise(values, *advices)
    return found


def _advise(values: torch.Tensor, *advices: int) -> None:
    """Tell the system what the pages of a tensor are for; it may not know how to do it."""
    if sys.platform != "linux":
        return
    address = values.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = values.data_ptr() + values.nbytes - address
    if (advise := _find_madvise()) is not None:
        for advice in advices:
            advise(ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_int(advice))


@functools.cache
def _find_madvise() -> Any:
    """Return the system's function, None where there is none; to find it takes longer than to call it."""
    with contextlib.suppress(OSError, AttributeError):
        return ctypes.CDLL(None).madvise
    return None
