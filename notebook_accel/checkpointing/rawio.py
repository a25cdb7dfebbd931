"""Tensors to files and back without a copy in between, by several threads."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

_CHUNK: Final = 32 << 20
_THREADS: Final = 4

Piece = tuple[int, torch.Tensor]
"""Where in the file a tensor starts, and the tensor."""


def memory(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor; the tensor must outlive them."""
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def write_at(path: Path, pieces: Sequence[Piece]) -> None:
    """Write tensors of any device into an existing file."""
    _each_chunk(path, "r+b", pieces, _write)


def read_at(path: Path, pieces: Sequence[Piece]) -> None:
    """Fill contiguous CPU tensors from the file; OSError where it is too short."""
    _each_chunk(path, "rb", pieces, _read)


def sync(path: Path) -> None:
    """Return once the file, or on systems that know this the folder, is on the disk."""
    if os.name == "nt":
        if path.is_file():
            with open(path, "r+b") as file:
                os.fsync(file.fileno())
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _each_chunk(
    path: Path,
    mode: str,
    pieces: Sequence[Piece],
    work: Callable[[Path, str, int, torch.Tensor, int, int], None],
) -> None:
    jobs = []
    for offset, tensor in pieces:
        step = _CHUNK if tensor.device.type == "cpu" else max(tensor.nbytes, 1)
        for start in range(0, tensor.nbytes, step):
            jobs.append((path, mode, offset, tensor, start, min(start + step, tensor.nbytes)))
    total = sum(tensor.nbytes for _, tensor in pieces)
    _work_off([lambda job=job: work(*job) for job in jobs], 1 if total < _CHUNK else _THREADS)  # type: ignore[misc]


def _work_off(jobs: list[Callable[[], None]], num_threads: int) -> None:
    """Do all jobs and raise the first error; an executor would refuse them while the interpreter ends."""
    waiting = iter(jobs)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def run() -> None:
        while not errors:
            with lock:
                job = next(waiting, None)
            if job is None:
                return
            try:
                job()
            except BaseException as error:  # raised by the caller's thread
                errors.append(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(min(num_threads, len(jobs)) - 1)]
    for thread in threads:
        thread.start()
    run()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _write(path: Path, mode: str, offset: int, tensor: torch.Tensor, start: int, end: int) -> None:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        tensor = tensor.detach().to("cpu").contiguous()
    left = memory(tensor)[start:end]
    with _open(path, mode) as file:
        file.seek(offset + start)
        while left:
            left = left[file.write(left) :]


def _read(path: Path, mode: str, offset: int, tensor: torch.Tensor, start: int, end: int) -> None:
    left = memory(tensor)[start:end]
    with _open(path, mode) as file:
        file.seek(offset + start)
        while left:
            got = file.readinto(left)
            if not got:
                raise OSError(f"{path} ends before its byte {offset + end}")
            left = left[got:]


def _open(path: Path, mode: str) -> Any:
    return open(path, mode, buffering=0)
