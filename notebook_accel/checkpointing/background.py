"""Writes a checkpoint in a thread while training goes on: copies, the thread, and barriers without collectives."""

from __future__ import annotations

import atexit
import contextlib
import copy
import dataclasses
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from .. import runtime
from ..errors import CheckpointError
from ..notices import tell
from .copies import Copies
from .write import ErrorBarrier, File

_PAUSE_S: Final = 0.02
_ROOM_S: Final = 20.0  # in which parts of a checkpoint that failed are removed
_NO_ROOM: Final = ".no_room"


def snapshot(files: Sequence[File], copies: Copies) -> list[File]:
    """Return the files with copies of their contents, which training does not change.

    Args:
        files: of this rank.
        copies: makes the copies of tensors.
    """
    return [
        dataclasses.replace(
            file, content=copy.deepcopy(file.content) if file.opaque else copies.of(file.content)
        )
        for file in files
    ]


class BackgroundWriter:
    """Writes one checkpoint at a time; its errors are raised by the next `wait`.

    Pickled it is None: the checkpoint that it writes is of this process alone.
    """

    def __init__(self) -> None:
        self.copies = Copies()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def start(self, work: Callable[[], None], target: Path, folders: Sequence[Path]) -> None:
        """Run `work` in a thread, which the interpreter waits for before it ends, and the launcher for a while.

        Args:
            work: writes the checkpoint.
            target: the checkpoint's folder.
            folders: what there is of it until it is whole.

        Raises:
            CheckpointError: the checkpoint before this one could not be written.
        """
        self.wait()

        reporter = runtime.reporter()

        def note(is_over: bool) -> None:
            if reporter is not None:
                reporter.note_save(str(target), list(map(str, folders)), is_over)

        def run() -> None:
            try:
                work()
            except BaseException as error:  # raised by the next wait
                self._error = error
            note(is_over=True)

        note(is_over=False)
        atexit.register(self._at_exit)
        self._thread = threading.Thread(target=run, name=f"checkpoint {target.name}", daemon=False)
        self._thread.start()

    def wait(self) -> None:
        """Return once the checkpoint is on the disk; CheckpointError if it could not be written."""
        self._join()
        error, self._error = self._error, None
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            raise CheckpointError(f"a checkpoint saved in the background was not written: {error}") from error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self.copies.reset()
            atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        self._join()
        if self._error is not None:
            tell(f"a checkpoint saved in the background was not written: {self._error}")


class FileErrorBarrier(ErrorBarrier):
    """For a thread, whose collectives would mix with those of the main thread: each barrier is a file of each rank.

    The disk may be full. A file that says that nothing went wrong is empty, and so is one that says that something did
    where there is no room for what; once a rank has failed, the parts of the checkpoint are removed, which makes room.

    Args:
        folder: where the files go, seen by all ranks, for this checkpoint alone; rank 0 removes it.
        rank: of this process.
        world_size: number of ranks.
        timeout_s: seconds to wait for the slowest rank; CheckpointError names who is missing.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, timeout_s: float = 1800.0) -> None:
        self._folder = folder
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._gave_up = False
        self._has_failed = False  # some rank, at an earlier stage
        if world_size > 1:
            with contextlib.suppress(OSError):  # while there is room; `_post` raises where it is not there
                folder.mkdir(parents=True, exist_ok=True)

    def exchange(self, stage: str, error: str | None) -> list[str | None]:
        if self._world_size == 1:
            return [error]
        self._post(stage, error)
        others = {rank: self._wait(stage, rank) for rank in range(self._world_size) if rank != self._rank}
        found = [others.get(rank, error) for rank in range(self._world_size)]
        self._has_failed |= any(text is not None for text in found)
        return found

    def close(self) -> None:
        if self._world_size == 1 or self._gave_up:
            return
        if self._rank != 0:
            self._post("left", None)
            return
        for rank in range(1, self._world_size):
            self._wait("left", rank)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _post(self, stage: str, error: str | None) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{stage}-{self._rank}"
        if error is None:
            path.touch()
        elif not self._write(path, error):
            path.with_suffix(_NO_ROOM).touch()

    def _write(self, path: Path, error: str) -> bool:
        """Write an error; return whether there was room, which is waited for where parts are being removed."""
        deadline = time.monotonic() + (_ROOM_S if self._has_failed else 0)
        part = path.with_suffix(".part")
        while True:
            try:
                part.write_text(error, encoding="utf-8")
                os.replace(part, path)
                return True
            except OSError:
                if time.monotonic() >= deadline:
                    return False
            time.sleep(_PAUSE_S)

    def _wait(self, stage: str, rank: int) -> str | None:
        path = self._folder / f"{stage}-{rank}"
        deadline = time.monotonic() + self._timeout_s
        while not path.exists():
            if path.with_suffix(_NO_ROOM).exists():
                return "it failed, and the disk has no room for what it says"
            if time.monotonic() > deadline:
                self._gave_up = True
                raise CheckpointError(f"rank {rank} did not finish its part within {self._timeout_s:g} s")
            time.sleep(_PAUSE_S)
        return path.read_text(encoding="utf-8") or None
