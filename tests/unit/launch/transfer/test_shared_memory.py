"""Memory without a name, also where Python or the system has no such calls."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from notebook_accel.errors import LaunchError
from notebook_accel.launch.transfer import shared_memory
from notebook_accel.launch.transfer.unpicklable import pack_value

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems use a file anyway")


def refuse(number: int) -> object:
    def create(*args: object) -> int:
        raise OSError(number, os.strerror(number))

    return create


@pytest.mark.parametrize("lack", [None, errno.ENOSYS, errno.EPERM])
def test_a_file_takes_its_place(lack: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A Python that was built on an old system has no such function; a sandbox forbids it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if lack is None:
        monkeypatch.delattr(os, "memfd_create")
        monkeypatch.delattr(os, "MFD_CLOEXEC")
    else:
        monkeypatch.setattr(os, "memfd_create", refuse(lack))
    fd = shared_memory.write_unnamed(b"some bytes")
    with open(fd, "rb") as file:
        assert file.read() == b"some bytes"
    segment = shared_memory.SharedPickle(pack_value({"a": 1}))
    assert segment.open() == {"a": 1}
    assert not list(tmp_path.iterdir())


def test_a_full_system_is_no_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", refuse(errno.ENFILE))
    with pytest.raises(OSError, match="Too many open files in system"):
        shared_memory.write_unnamed(b"some bytes")


@pytest.fixture
def in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have memory of some megabytes lie in four files."""
    monkeypatch.setattr(shared_memory, "_LARGE", 1 << 20)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


@pytest.mark.usefixtures("in_files")
@pytest.mark.parametrize("count", [1 << 18, 900_001, 1 << 20])
def test_large_memory_lies_in_several_files(count: int) -> None:
    value = {"text": "x" * 1000, "a": np.arange(count), "b": np.arange(count // 3) + 0.5, "c": np.ones(7)}
    before = len(os.listdir("/proc/self/fd"))
    segment = shared_memory.SharedPickle(pack_value(value))
    twin = shared_memory.SharedPickle.from_filenos(segment.layout, [os.dup(fd) for fd in segment.filenos()])
    number = len(os.listdir("/proc/self/fd")) - before
    back = segment.open()
    assert number > 2 and len(os.listdir("/proc/self/fd")) - before == number // 2
    assert back["text"] == value["text"]
    assert all(np.array_equal(back[name], value[name]) for name in "abc")
    back["a"][:] = 0  # private to who has opened it
    assert np.array_equal(twin.open()["a"], value["a"])
    assert len(os.listdir("/proc/self/fd")) == before
    address = back["a"].ctypes.data
    assert is_mapped(address)
    del back
    assert not is_mapped(address)


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
    return any(low <= address < high for low, high in spans)


@pytest.mark.usefixtures("in_files")
def test_files_that_cannot_be_written_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    written = os.pwrite

    def fail(fd: int, data: bytes, position: int) -> int:
        if position:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return written(fd, data[: len(data) // 2], position)

    monkeypatch.setattr(os, "pwrite", fail)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(LaunchError, match=r"no shared memory: .*; raise the limit on memory"):
        shared_memory.SharedPickle(pack_value(np.arange(1 << 20)))
    assert len(os.listdir("/proc/self/fd")) == before
