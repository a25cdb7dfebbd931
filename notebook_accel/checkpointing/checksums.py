"""Checksums of tensors in files: fast enough to be compared whenever values are read.

A checksum is the CRC-32 of sums: one of the 64-bit words of each page of 4 KiB, and the CRC-32 of what is left. A sum
is much faster than a CRC, and changes with every byte of its page.
"""

from __future__ import annotations

import queue
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch

from . import rawio

_PAGE: Final = 4096
_AT_ONCE: Final = (
    63  # pages: torch adds up larger tensors in threads of its own, and starts them for each thread here
)
_CHUNK: Final = 4 * _AT_ONCE * _PAGE  # stays in a core's cache
_THREADS: Final = 4


def compute(tensor: torch.Tensor) -> int:
    """Return the checksum of a contiguous CPU tensor."""
    return zlib.crc32(_sum_pages(rawio.memory(tensor)))


def read(path: Path, pieces: Sequence[rawio.Piece]) -> list[int]:
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


def compute_in_file(path: Path, spans: Sequence[tuple[int, int]]) -> list[int]:
    """Return the checksums of parts of a file, of which little is in memory at a time.

    Args:
        path: of the file.
        spans: of each part the byte where it starts, and its length.

    Raises:
        OSError: the file cannot be read, or is too short.
    """
    sums: dict[tuple[int, int], bytes] = {}
    blocks: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
    for _ in range(_THREADS):
        blocks.put(rawio.memory(torch.empty(_CHUNK, dtype=torch.uint8, device="cpu")))

    jobs = [(index, start) for index, span in enumerate(spans) for start in range(0, span[1], _CHUNK)]
    with rawio.CachedFile(path) as file:

        def add(index: int, start: int) -> None:
            offset, length = spans[index]
            block = blocks.get()
            view = block[: min(_CHUNK, length - start)]
            file.read(offset + start, view)
            sums[index, start] = _sum_pages(view)
            blocks.put(block)

        rawio.run_jobs([lambda job=job: add(*job) for job in jobs], _THREADS)  # type: ignore[misc]
    return _join(sums, len(spans))


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


def _sum_pages(view: memoryview) -> bytes:
    whole = len(view) // _PAGE
    found = b""
    if whole:
        words = torch.frombuffer(view, dtype=torch.int64, count=whole * _PAGE // 8).view(whole, -1)
        sums = [part.sum(1) for part in words.split(_AT_ONCE)]
        found = bytes(rawio.memory(torch.cat(sums)))
    left = view[whole * _PAGE :]
    return found + zlib.crc32(left).to_bytes(4, "little") if left else found
