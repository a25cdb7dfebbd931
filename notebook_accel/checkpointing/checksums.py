"""Checksums of bytes: computed while a file is written or read, and compared before anything is loaded from it.

A checksum is the CRC-32 of sums: of the 64-bit words of each page, and of the CRC-32 of what is left. A sum is much
faster than a CRC, and changes with every byte of its page; it does not see two words that changed places, or of which
one grew as the other shrank. The first block of a file, which is all of a small one, has a plain CRC-32.
"""

from __future__ import annotations

import queue
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch

from . import rawio

DIGITS: Final = 8
"""Hexadecimal digits of a checksum."""
BLOCK: Final = 1 << 20
"""Bytes of a file that have a checksum together, and are read together: they stay in a core's cache."""

# pages: torch adds up larger tensors in threads of its own, and starts them for each thread here
_AT_ONCE: Final = 63
_THREADS: Final = 4
_WORD: Final = 8


class Written(NamedTuple):
    """What the writer of a file knows of it: how many bytes it wrote, and their checksums."""

    size: int
    checksums: str


def compute(values: memoryview) -> int:
    """Return the checksum of bytes in memory."""
    return zlib.crc32(_sum_pages(values))


def read_into(path: Path, pieces: Sequence[rawio.Piece]) -> list[int]:
    """Fill tensors from a file, and return the checksum of each.

    Args:
        path: of the file.
        pieces: see `rawio.read_at`.

    Raises:
        OSError: the file cannot be read, or is too short.
    """
    sums: dict[tuple[int, int], bytes] = {}

    def add(index: int, start: int, view: memoryview) -> None:
        sums[index, start] = _sum_pages(view)

    rawio.read_at(path, pieces, on_read=add)
    return _join(sums, len(pieces))


def compute_at(path: Path, spans: Sequence[tuple[int, int]]) -> list[int]:
    """Return the checksums of parts of a file, of which little is in memory at a time.

    Args:
        path: of the file.
        spans: of each part the byte where it starts, and its length.

    Raises:
        OSError: the file cannot be read, or is too short.
    """
    sums: dict[tuple[int, int], bytes] = {}
    free: queue.SimpleQueue[_Workspace] = queue.SimpleQueue()
    jobs = [(index, start) for index, span in enumerate(spans) for start in range(0, span[1], BLOCK)]
    if not jobs:
        return [0] * len(spans)
    for _ in range(min(_THREADS, len(jobs))):
        free.put(_Workspace())
    with rawio.CachedFile(path) as file:

        def add(index: int, start: int) -> None:
            offset, length = spans[index]
            space = free.get()
            view = space.block[: min(BLOCK, length - start)]
            file.read(offset + start, view)
            sums[index, start] = space.sum_pages() if len(view) == BLOCK else _sum_pages(view)
            free.put(space)

        rawio.run_jobs([lambda job=job: add(*job) for job in jobs], _THREADS)  # type: ignore[misc]
    return _join(sums, len(spans))


class Blocks:
    """The checksums of the blocks of a file that is being written.

    Attributes:
        text: those of all blocks so far, one after the other.
        size: bytes so far.
    """

    def __init__(self) -> None:
        self.text = ""
        self.size = 0

    def add(self, values: memoryview) -> None:
        """Take the next bytes: whole blocks, but for the last ones of the file."""
        self.size += len(values)
        for start in range(0, len(values), BLOCK):
            block = values[start : start + BLOCK]
            self.text += show(compute(block) if self.text else zlib.crc32(block))


def show(checksum: int) -> str:
    """Return a checksum as text."""
    return f"{checksum:0{DIGITS}x}"


def describe(path: Path) -> str:
    """Return the checksums of all blocks of a file as one text."""
    return "".join(map(show, _compute_blocks(path, _blocks_of(path.stat().st_size))))


def find_damage(
    path: Path, text: str, spans: Iterable[tuple[int, int]] | None = None
) -> tuple[int, int] | None:
    """Return where the first block starts and ends that has changed since the file was written; None for no such block.

    Args:
        path: of the file.
        text: what `describe` returned then.
        spans: parts of the file, each the byte where it starts and its length: only their blocks count. None for all.

    Raises:
        OSError: the file cannot be read.
    """
    blocks = _blocks_of(path.stat().st_size)
    if len(blocks) * DIGITS != len(text):
        return 0, path.stat().st_size
    numbers: Iterable[int] = range(len(blocks))
    if spans is not None:
        parts = [range(start // BLOCK, -(-(start + length) // BLOCK)) for start, length in spans]
        numbers = sorted({number for part in parts for number in part})
    wanted = [(number, blocks[number]) for number in numbers]
    found = _compute_blocks(path, [span for _, span in wanted])
    for (number, (start, length)), checksum in zip(wanted, found, strict=True):
        if show(checksum) != text[number * DIGITS : (number + 1) * DIGITS]:
            return start, start + length
    return None


def _compute_blocks(path: Path, blocks: Sequence[tuple[int, int]]) -> list[int]:
    """Return the checksums of blocks of a file, given in order."""
    if not blocks or blocks[0][0] != 0:
        return compute_at(path, blocks)
    with open(path, "rb") as file:
        first = zlib.crc32(file.read(blocks[0][1]))
    return [first, *compute_at(path, blocks[1:])]


def _blocks_of(size: int) -> list[tuple[int, int]]:
    return [(start, min(BLOCK, size - start)) for start in range(0, size, BLOCK)]


def _join(sums: Mapping[tuple[int, int], bytes], count: int) -> list[int]:
    """Return the checksum of each part.

    Args:
        sums: of chunks, by the number of the part and the byte where the chunk starts in it.
        count: of parts.
    """
    found = [0] * count
    for key in sorted(sums):
        found[key[0]] = zlib.crc32(sums[key], found[key[0]])
    return found


class _Workspace:
    """Memory to read into, and views of it that are made once, for a thread that adds up many chunks."""

    def __init__(self) -> None:
        with torch.inference_mode(False):  # the threads that write to these tensors are in no such mode
            values = torch.empty(BLOCK, dtype=torch.uint8, device="cpu")
            sums = torch.empty(BLOCK // rawio.PAGE, dtype=torch.int64, device="cpu")
        self.block = rawio.memory(values)
        self._sums = rawio.memory(sums)
        words = values.view(torch.int64).view(len(sums), -1)
        self._parts = list(zip(words.split(_AT_ONCE), sums.split(_AT_ONCE), strict=True))

    def sum_pages(self) -> bytes:
        """Return the sums of the pages of a chunk that fills the memory."""
        for words, sums in self._parts:
            torch.sum(words, 1, out=sums)
        return bytes(self._sums)


def _sum_pages(view: memoryview) -> bytes:
    whole = len(view) // rawio.PAGE
    found = b""
    if whole:
        words = torch.frombuffer(view, dtype=torch.int64, count=whole * rawio.PAGE // _WORD).view(whole, -1)
        sums = torch.empty(whole, dtype=torch.int64, device="cpu")
        for part, into in zip(words.split(_AT_ONCE), sums.split(_AT_ONCE), strict=True):
            torch.sum(part, 1, out=into)
        found = bytes(rawio.memory(sums))
    left = view[whole * rawio.PAGE :]
    return found + zlib.crc32(left).to_bytes(4, "little") if left else found
