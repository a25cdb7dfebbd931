"""Where processes of this machine put their sockets: the system limits the length of a socket's path."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import process, util
from pathlib import Path
from typing import Any, Final

from ...errors import LaunchError
from .. import socket_owners

_LONGEST: Final = 107 if sys.platform == "linux" else 103  # bytes of a path, sun_path in unix(7)
_LISTENER: Final = len("/pymp-12345678/listener-12345678")
_KEY: Final = "tempdir"  # where multiprocessing keeps its folder, also for the processes that this one starts


def use_short_folder() -> None:
    """Let multiprocessing's sockets lie in another folder where the path of temporary files is too long for them.

    The fork server has such a socket, and so have tensors that data loader workers send. The processes that this one
    starts inherit the folder.

    Raises:
        LaunchError: there is no folder with a shorter path.
    """
    if sys.platform == "win32":
        return
    settings: dict[str, Any] = vars(process.current_process())["_config"]
    present = settings.get(_KEY)
    if present is not None and _has_room(os.path.dirname(present), _LISTENER):
        return
    parent = find_folder(_LISTENER)
    if present is None and parent == tempfile.gettempdir():
        return
    folder = _make(parent)
    util.Finalize(  # as multiprocessing removes its own
        None, shutil.rmtree, args=(folder,), kwargs={"ignore_errors": True}, exitpriority=-100
    )
    settings[_KEY] = folder


def make_own() -> None:
    """Let multiprocessing make its folder now, where it has none, with a mark that this process owns it."""
    if vars(process.current_process())["_config"].get(_KEY) is None:
        _remove_abandoned()
        socket_owners.mark(util.get_temp_dir())


def _make(parent: str) -> str:
    """Make a folder that this process owns."""
    _remove_abandoned()
    folder = tempfile.mkdtemp(prefix=socket_owners.PREFIX, dir=parent)
    socket_owners.mark(folder)
    return folder


@functools.cache
def _remove_abandoned() -> None:
    """Remove the folders of processes that were killed; once in a process, as there may be many files beside them."""
    socket_owners.remove_abandoned()


class WorkersFolder:
    """Where workers and their processes have multiprocessing's sockets: those that are killed remove none."""

    def __init__(self) -> None:
        self._path: str | None = None

    def assign(self, worker: Any) -> None:
        """Let a worker use the folder, with all processes that it starts.

        On a full disk there is none: a worker that needs no socket runs without.

        Args:
            worker: a process of multiprocessing, not started yet.

        Raises:
            LaunchError: there is no folder with a path that is short enough.
        """
        if sys.platform == "win32":
            return
        if self._path is None:
            try:
                self._path = _make(find_folder(_LISTENER))
            except OSError:
                return
        vars(worker)["_config"][_KEY] = self._path

    def remove(self) -> None:
        """Remove the folder, once the workers have ended."""
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)
            self._path = None


@contextlib.contextmanager
def keep_tidy() -> Iterator[None]:
    """Let processes that this one starts have their sockets in its folder, and remove those of killed ones.

    Data loader workers have such sockets. Which are in use is known on Linux only: elsewhere they stay until this
    process ends, or longer.
    """
    if sys.platform != "linux":
        yield
        return
    with contextlib.suppress(OSError, LaunchError):
        use_short_folder()
        make_own()
    try:
        yield
    finally:
        _remove_unused(vars(process.current_process())["_config"].get(_KEY))


def _remove_unused(folder: str | None) -> None:
    """Remove sockets that no process has open: asking them would be a request to a fork server."""
    with contextlib.suppress(OSError):
        paths = {str(path) for path in Path(folder or "").glob("listener-*")} if folder else set()
        if not paths:
            return
        for path in paths - socket_owners.list_used():
            os.unlink(path)


def find_folder(length: int) -> str:
    """Return the folder for temporary files, or another one where its path is too long.

    Args:
        length: of what follows in the path of a socket.

    Raises:
        LaunchError: there is no folder with a path that is short enough.
    """
    asked = tempfile.gettempdir()
    for folder in (asked, *socket_owners.OTHERS):
        if _has_room(folder, length) and os.access(folder, os.W_OK | os.X_OK):
            return folder
    others = ", ".join(socket_owners.OTHERS)
    raise LaunchError(
        f"TMPDIR is {asked}, {len(os.fsencode(asked))} bytes long, and the path of a socket in it would be longer than "
        f"the {_LONGEST} bytes that the system allows; nothing can be written in {others}: set TMPDIR to a "
        f"folder whose path has {_LONGEST - length} bytes at most"
    )


def _has_room(folder: str, length: int) -> bool:
    return len(os.fsencode(folder)) + length <= _LONGEST
