"""Memory without a name, also where Python or the system has no such calls."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

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
