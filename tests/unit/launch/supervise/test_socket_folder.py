"""Sockets where the path of temporary files is long."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import process
from multiprocessing.connection import Listener
from pathlib import Path

import pytest

from notebook_accel.errors import LaunchError
from notebook_accel.launch import socket_owners
from notebook_accel.launch.supervise import socket_folder

pytestmark = pytest.mark.skipif(os.name == "nt", reason="sockets have no paths there")


@pytest.fixture
def long_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder whose path is too long, in which multiprocessing has no folder yet."""
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setitem(process.current_process()._config, "tempdir", None)  # type: ignore[attr-defined]
    yield folder
    if chosen := find_chosen():
        shutil.rmtree(chosen, ignore_errors=True)


def find_chosen() -> str | None:
    return process.current_process()._config.get("tempdir")  # type: ignore[attr-defined, no-any-return]


def open_socket() -> None:
    Listener(family="AF_UNIX").close()


@pytest.mark.parametrize("was_used", [False, True])
def test_sockets_of_multiprocessing_find_room(long_folder: Path, was_used: bool) -> None:
    if was_used and sys.version_info < (3, 14):  # which looks for a shorter path itself
        with pytest.raises(OSError, match="AF_UNIX path too long"):
            open_socket()
    socket_folder.use_short_folder()
    open_socket()
    chosen = find_chosen()
    socket_folder.use_short_folder()
    assert chosen is not None and find_chosen() == chosen and not chosen.startswith(str(long_folder))
    assert os.stat(chosen).st_mode & 0o777 == 0o700
    assert tempfile.gettempdir() == str(long_folder), "the user's own files stay where they were"


def test_a_path_with_room_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    monkeypatch.setitem(process.current_process()._config, "tempdir", None)  # type: ignore[attr-defined]
    socket_folder.use_short_folder()
    assert find_chosen() is None
    assert socket_folder.find_folder(60) == "/tmp"


def test_where_no_folder_has_room_the_error_says_so(
    long_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_owners, "OTHERS", ("/nowhere",))
    with pytest.raises(LaunchError, match=r"TMPDIR is /.*: set TMPDIR to a folder whose path has \d+ bytes"):
        socket_folder.use_short_folder()
