"""Tests for files written by a thread and read by several."""

from __future__ import annotations

import contextlib
import errno
import gc
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from notebook_accel.checkpointing import rawio
from notebook_accel.checkpointing.rawio import Output
from tests.unit.clock import PATIENCE_S, wait_until

BLOCK = rawio.BLOCK
SIZES = [0, 1, 511, 4096, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 7 * BLOCK + 4096, 9 * BLOCK + 12345]


def noise(size: int) -> bytes:
    return torch.randint(0, 256, (size,), dtype=torch.uint8).numpy().tobytes()


def write(path: Path, parts: Sequence[bytes], cached: bool) -> None:
    with Output(path, cached=cached) as file:
        for part in parts:
            assert file.write(part) == len(part)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_a_file_holds_what_was_written(tmp_path: Path, size: int, cached: bool) -> None:
    content = noise(size)
    path = tmp_path / "file"
    path.write_bytes(b"longer than before" * 10)
    write(path, [content], cached)
    assert path.read_bytes() == content
    third = size // 3
    write(path, [content[:third], content[third : third + 7], content[third + 7 :]], cached)
    assert path.read_bytes() == content


def is_cached(path: Path) -> bool:
    with open(path, "rb") as file:
        return rawio._Residence(file.fileno()).is_cached(0, path.stat().st_size)


def writes_past_the_cache(folder: Path) -> bool:
    """Return whether a file system leaves out of the cache what one plain direct write has written."""
    path = folder / "direct"
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | rawio.DIRECT)
    except OSError:
        return False
    with mmap.mmap(-1, BLOCK) as aligned:
        try:
            os.write(file, aligned)
        except OSError:
            return False
        finally:
            os.close(file)
    return not is_cached(path)


def test_a_file_past_the_cache_is_not_in_it(tmp_path: Path) -> None:
    for cached in (True, False):
        path = tmp_path / f"cached {cached}"
        write(path, [noise(4 * BLOCK)], cached)
        assert is_cached(path) == (cached or not writes_past_the_cache(tmp_path))


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("size", [100, BLOCK, 20 * BLOCK])
def test_a_full_disk_is_an_error_and_no_hang(size: int, cached: bool) -> None:
    with pytest.raises(OSError, match="No space left on device") as caught:
        write(Path("/dev/full"), [noise(size)], cached)
    assert caught.value.errno == errno.ENOSPC


def test_an_error_of_the_thread_ends_the_next_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: int, data: Any) -> int:
        raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr(os, "write", fail)
    written = []
    with pytest.raises(OSError, match="the disk is broken"), Output(tmp_path / "file") as file:
        for number in range(1000):
            file.write(b"x" * BLOCK)
            written.append(number)
            time.sleep(0.001)
    assert len(written) < 100, "it was written on and on"


def test_an_error_of_the_writer_ends_the_thread(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="mine"), Output(tmp_path / "file") as file:
        file.write(b"x" * 3 * BLOCK)
        raise KeyError("mine")
    assert not any(thread.name == "checkpoint output" for thread in threading.enumerate())


def test_a_slow_disk_keeps_the_writer_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, real = [], os.write

    def slow(file: int, data: Any) -> int:
        time.sleep(0.01)
        written.append(len(data))
        return real(file, data[: len(data) // 2 + 1])  # and takes half of what it is given

    monkeypatch.setattr(os, "write", slow)
    content = noise(6 * BLOCK + 5)
    with Output(tmp_path / "file") as file:
        for start in range(0, len(content), BLOCK):
            file.write(content[start : start + BLOCK])
            ahead = start + BLOCK - sum(length // 2 + 1 for length in written)
            assert ahead <= (rawio._NUM_BLOCKS + 1) * BLOCK
    assert (tmp_path / "file").read_bytes() == content


def test_other_rules_of_alignment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that refuses direct writes of some sizes gets plain ones."""
    real, refused = os.write, []

    def picky(file: int, data: Any) -> int:
        import fcntl

        if fcntl.fcntl(file, fcntl.F_GETFL) & rawio.DIRECT:
            refused.append(len(data))
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(file, data)

    monkeypatch.setattr(os, "write", picky)
    content = noise(5 * BLOCK + 77)
    write(tmp_path / "file", [content], cached=False)
    assert (tmp_path / "file").read_bytes() == content
    assert len(refused) <= 1


def forget(path: Path) -> None:
    """Take a file out of the system's cache."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


@pytest.mark.parametrize("few", [0, 1 << 40])
@pytest.mark.parametrize("known", ["all", "none", "some"])
def test_tensors_are_read_from_any_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few: int, known: str
) -> None:
    monkeypatch.setattr(rawio, "_FEW", few)
    content = noise(3 * rawio._CHUNK + 12345)
    path = tmp_path / "file"
    path.write_bytes(content)
    if known != "all":
        forget(path)
    if known == "some":
        with open(path, "rb") as file:
            file.read(rawio._CHUNK)
    spans = [(0, 10), (8, 4096), (4096, 4096), (5000, 2 * rawio._CHUNK), (len(content) - 77, 77), (9, 0)]
    tensors = [torch.zeros(length, dtype=torch.uint8) for _, length in spans]
    rawio.read_at(path, [(start, tensor) for (start, _), tensor in zip(spans, tensors, strict=True)])
    for (start, length), tensor in zip(spans, tensors, strict=True):
        assert tensor.numpy().tobytes() == content[start : start + length], (start, length)


@pytest.mark.parametrize("few", [0, 1 << 40])
@pytest.mark.parametrize("missing", [1, 5000, 2 << 20])
def test_a_file_that_is_too_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few: int, missing: int
) -> None:
    monkeypatch.setattr(rawio, "_FEW", few)
    path = tmp_path / "file"
    path.write_bytes(noise(rawio._CHUNK))
    forget(path)
    with pytest.raises(OSError, match="ends before its byte"):
        rawio.read_at(path, [(missing, torch.zeros(rawio._CHUNK, dtype=torch.uint8))])


def test_bytes_keep_their_tensor() -> None:
    view = rawio.memory(torch.arange(1000))
    others = [torch.zeros(1000, dtype=torch.int64) for _ in range(10)]
    assert view[8:9] == b"\x01" and others


def test_a_file_larger_than_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # of holes
        file.seek(1 << 39)
        file.write(b"found")
    tensor = torch.ones(rawio._FEW + 1, dtype=torch.uint8)
    rawio.read_at(path, [(1 << 39, tensor)])
    assert bytes(tensor[:6].tolist()) == b"found\0" and not tensor[5:].any()


def test_nothing_runs_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    go, done = threading.Event(), []
    join = threading.Thread.join

    def interrupted(self: threading.Thread, timeout: float | None = None) -> None:
        monkeypatch.setattr(threading.Thread, "join", join)
        go.set()
        raise KeyboardInterrupt

    def job() -> None:
        if threading.current_thread() is threading.main_thread():
            started.wait(PATIENCE_S)
            return
        started.set()
        go.wait(PATIENCE_S)
        time.sleep(0.05)
        done.append("slow")

    started, before = threading.Event(), threading.active_count()
    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rawio.run_jobs([job, job], 2)
    assert done == ["slow"] and threading.active_count() == before


def test_nothing_is_written_after_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    join, put, before = threading.Thread.join, Output._put, threading.active_count()

    def interrupted(self: threading.Thread, timeout: float | None = None) -> None:
        monkeypatch.setattr(threading.Thread, "join", join)
        raise KeyboardInterrupt

    def slow(self: Output, block: Any, length: int) -> None:
        wait_until(lambda: self._error is not None)  # the interrupt comes while the first block is written
        put(self, block, length)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    monkeypatch.setattr(Output, "_put", slow)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "file", [bytes(2 * BLOCK)], False)
    assert threading.active_count() == before
    assert (tmp_path / "file").stat().st_size < 2 * BLOCK


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no thread be started, as at the end of an interpreter of Python 3.12."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.mark.parametrize("cached", [True, False])
def test_a_file_is_written_without_threads(tmp_path: Path, no_threads: None, cached: bool) -> None:
    data = os.urandom(5 * rawio.BLOCK + 17)
    with Output(tmp_path / "file", cached=cached) as output:
        for start in range(0, len(data), 3_000_000):
            output.write(data[start : start + 3_000_000])
    assert (tmp_path / "file").read_bytes() == data


def test_jobs_run_without_threads(no_threads: None) -> None:
    done: list[int] = []
    rawio.run_jobs([lambda number=number: done.append(number) for number in range(5)], 3)  # type: ignore[misc]
    assert done == [0, 1, 2, 3, 4]
    with pytest.raises(OSError, match="bad"):
        rawio.run_jobs([lambda: done.append(5), _fail], 2)


def _fail() -> None:
    raise OSError("bad")


def write_small(path: Path) -> None:
    with rawio.create(path) as file:
        file.write(b"x" * 100)


def write_several_blocks(path: Path) -> None:
    with rawio.create(path) as file:
        file.write(b"x" * (3 * BLOCK))


def read_tensors(path: Path) -> None:
    with rawio.CachedFile(path) as file:
        file.read(0, memoryview(bytearray(4)))
    with rawio._Source(path) as source:
        source.read(0, memoryview(bytearray(4)))


def interrupt(number: int, action: Callable[[], None]) -> int:
    """Interrupt an action at so many lines of `rawio`; return the number of the line, 0 where it has not so many."""
    left, place = number, 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left, place
        if frame.f_code.co_filename != rawio.__file__:
            return None
        left -= event == "line"
        if left == 0 and not place:
            place = frame.f_lineno
            raise KeyboardInterrupt
        return trace

    tracing = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        assert place
    finally:
        sys.settrace(tracing)
    return place


def count_open() -> int:
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "checkpoint output":
            thread.join(PATIENCE_S)
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts this process's descriptors")
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("action", [write_small, write_several_blocks, read_tensors])
def test_an_interrupt_at_any_line_leaves_no_file_open(tmp_path: Path, action: Callable[[Path], None]) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345678")
    before, number = count_open(), 1
    while place := interrupt(number, lambda: action(path)):
        assert count_open() == before, f"line {place}"
        number += 1
    assert number > 10, "lines were counted"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts this process's descriptors")
def test_two_interrupts_at_any_line_leave_no_folder_open(tmp_path: Path) -> None:
    before, number, place = count_open(), 0, -1
    while place:
        number += 1
        left, place = number, 0

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal left, place
            if frame.f_code.co_filename != rawio.__file__:
                return None
            left -= event == "line"
            if left in (0, -1):
                place = frame.f_lineno
                signal.raise_signal(signal.SIGINT)
            return trace

        tracing = sys.gettrace()
        with contextlib.suppress(KeyboardInterrupt):
            sys.settrace(trace)
            try:
                rawio.sync(tmp_path)
            finally:
                sys.settrace(tracing)
        assert count_open() == before, f"line {place}"
    assert number > 4, "lines were counted"
