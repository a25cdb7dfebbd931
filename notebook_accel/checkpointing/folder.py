"""A checkpoint's folder: written under another name, put in its place whole, and found again after a crash.

Files are written to `NAME.saving-TOKEN`, which is then exchanged with `NAME` and removed. Systems that cannot exchange
two folders in one step need two renames: between them `NAME.previous-TOKEN` holds the old checkpoint. A process may die
at any instant: either `NAME` is whole, or `recover` brings it back. Several runs may save to `NAME` at a time: a token
is of one save and names its process, and nobody removes what a living process writes. The last save stays.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .. import owners
from ..errors import CheckpointError
from ..notices import tell
from . import manifest, names, rawio

PathLike = str | os.PathLike[str]

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_OLD_S: Final = 24 * 3600.0
_TOKEN: Final = rf"{owners.PATTERN}-[0-9a-f]{{8}}"
_LEFT: Final = re.compile(rf"(?P<name>.+)\.(?P<kind>saving|previous|meeting|removing)-{_TOKEN}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Staging:
    """The folders of one save, beside that of the checkpoint.

    Attributes:
        target: the checkpoint's folder.
        token: of this save alone, the same on all ranks; see `make_token`.
    """

    target: Path
    token: str

    @property
    def path(self) -> Path:
        """The folder in which the checkpoint is written."""
        return self.target.with_name(f"{self.target.name}.saving-{self.token}")

    @property
    def previous(self) -> Path:
        """The folder that holds the old checkpoint between two renames."""
        return self.target.with_name(f"{self.target.name}.previous-{self.token}")

    @property
    def barrier_files(self) -> Path:
        """The folder for the files by which ranks wait for each other in the background."""
        return self.target.with_name(f"{self.target.name}.meeting-{self.token}")


def make_token() -> str:
    """Return the part of a name that says which process writes there; unique for each call."""
    return f"{owners.describe_own()}-{uuid.uuid4().hex[:8]}"


def is_abandoned(path: Path) -> bool:
    """Return True for a file or folder with a token in its name whose process has ended.

    A process of another machine or container cannot be asked: what nobody has written to for a day is abandoned.
    """
    if owner := owners.find_in(path.name):
        return owner.has_ended()
    try:
        return max(each.lstat().st_mtime for each in (path, *path.rglob("*"))) < time.time() - _OLD_S
    except FileNotFoundError:  # it changes just now
        return False


def resolve(path: PathLike) -> Path:
    """Return the absolute path of a checkpoint; for a link, that of the folder it leads to."""
    target = Path(os.path.abspath(Path(path).expanduser()))
    return Path(os.path.realpath(target)) if target.is_symlink() else target


def check(target: Path) -> None:
    """Raise ValueError if a checkpoint cannot be there: at a file, a mount point, or around the working folder."""
    if target.is_file():
        raise ValueError(f"{target} is a file: a checkpoint is a folder, choose another name")
    inside = target == Path.cwd() or target in Path.cwd().parents
    if inside or os.path.ismount(target):
        kind = "the working folder or above it" if inside else "a mount point"
        raise ValueError(
            f"{target} is {kind}, which cannot be replaced in one step: save to a folder below it"
        )


def recover(target: Path) -> bool:
    """Restore the old checkpoint where a save died between its two renames; one that lives does them again.

    Return whether there is a folder.
    """
    if not target.exists():
        found = [path for path, kind in _list_left(target) if kind == "previous"]
        with contextlib.suppress(OSError):  # another process was faster
            if found:
                os.rename(max(found, key=lambda path: path.lstat().st_mtime), target)
    return target.is_dir()


def remove_unfinished(target: Path, token: str | None = None) -> None:
    """Remove leftovers of unfinished saves; the checkpoint before, or their own, is whole then.

    Args:
        target: the checkpoint's folder.
        token: of the save, whose ranks may still wait for each other; None for all whose process has ended.
    """
    recover(target)
    for path, kind in list(_list_left(target)):
        is_old = is_abandoned(path) if token is None else path.name.endswith(token) and kind != "meeting"
        if is_old and (kind != "previous" or target.exists()):
            with contextlib.suppress(OSError):  # another process removes it too, or it is another user's
                if kind == "previous":
                    _carry(path, target)
                remove(path)  # by a rename first: another rank may be putting it in its place


def _list_left(target: Path) -> Iterator[tuple[Path, str]]:
    """Yield what saves of a checkpoint have beside it, with its kind, and all checkpoints that are being removed."""
    for path in target.parent.glob("*-*"):
        found = _LEFT.fullmatch(path.name)
        if found is not None and (found["name"] == target.name or found["kind"] == "removing"):
            yield path, found["kind"]


def prepare(staging: Staging) -> None:
    """Make an empty folder to write the checkpoint in, and remove what saves of ended processes have left."""
    remove_unfinished(staging.target)
    staging.path.mkdir(parents=True)


def is_prepared(staging: Staging, rank: int) -> bool:
    """Return True where this process, of this rank, sees the folder that another one prepared."""
    own = staging.path / f".seen-{rank}"
    try:
        # asks the server of a network disk; a lookup may be answered by what this machine remembers
        os.mkdir(own)
        os.rmdir(own)
    except FileNotFoundError:
        return False
    except OSError:  # it is there, and writing to it will say what is wrong
        pass
    return True


def seal(staging: Staging, facts: Mapping[str, Any], ranks: Sequence[int]) -> None:
    """Make the written folder a whole checkpoint, durably.

    Files in the old folder that no checkpoint is made of stay: they are linked into the new one first.

    Args:
        staging: of this save.
        facts: what the manifest says besides files.
        ranks: those that wrote to this folder.

    Raises:
        CheckpointError: a file that they wrote is missing or has another size.
    """
    manifest.write(staging.path, facts, ranks)
    _carry(staging.target, staging.path)
    rawio.sync_tree(staging.path)


def put_in_place(staging: Staging, *, replaces: bool = True, keep: int | None = None) -> None:
    """Give the sealed folder its name, and remove the one that had it.

    Args:
        staging: of this save.
        replaces: False if the name is to be new.
        keep: how many automatically named checkpoints stay beside each other; None for all.

    Raises:
        CheckpointError: there is a checkpoint of that name, and `replaces` is False.
        OSError: the folder cannot be renamed.
    """
    target = staging.target
    old = _rename(staging, replaces)
    try:  # from here on it is saved
        rawio.sync(target.parent)
        _carry(old, target)
        remove(old)
        if keep is not None:
            for _, path in names.checkpoints(target.parent)[:-keep]:
                if path != target:
                    remove(path)
    except OSError as error:
        tell(f"checkpoint {target} is saved, but what it replaces cannot be removed: {error}")


def _rename(staging: Staging, replaces: bool) -> Path:
    """Put the folder in its place, and return where the old one is, if there was one."""
    new, target, old = staging.path, staging.target, staging.previous
    while not (replaces and _exchange(new, target)):
        if replaces:
            with contextlib.suppress(FileNotFoundError):  # there is none
                os.rename(target, old)
        try:
            os.rename(new, target)
            return old
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY) and not target.exists():
                raise
        if not replaces:
            raise CheckpointError(
                f"another run has saved {target} meanwhile: give each run a project_dir of its own, or set "
                "project_configuration.iteration to the number to go on with"
            )
        # another save was between our two renames, and is as whole as this one
        _carry(old, new)
        remove(old)
    return new


def remove(folder: Path) -> None:
    """Remove a checkpoint, if it is there. It gets another name first, so that half of it is never taken for one."""
    if folder.is_symlink():  # to a checkpoint that was put elsewhere by hand
        folder.unlink(missing_ok=True)
        return
    doomed = folder.with_name(f"{folder.name}.removing-{make_token()}")
    with contextlib.suppress(FileNotFoundError):  # another run removes it too
        os.rename(folder, doomed)
        shutil.rmtree(doomed)


def _carry(source: Path, into: Path, top: bool = True) -> None:
    """Link files that no checkpoint is made of into another folder; what is removed meanwhile is left out."""
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(source):
            if top and names.is_ours(entry.name):
                continue
            there = into / entry.name
            with contextlib.suppress(FileNotFoundError):
                if entry.is_dir(follow_symlinks=False):
                    there.mkdir(exist_ok=True)
                    _carry(Path(entry.path), there, top=False)
                elif not os.path.lexists(there):
                    _link(entry.path, there)


def _link(path: str, there: Path) -> None:
    try:
        os.link(path, there, follow_symlinks=False)
    except (FileExistsError, FileNotFoundError):  # another save was faster
        return
    except (OSError, NotImplementedError):  # a file system without hard links
        shutil.copy2(path, there, follow_symlinks=False)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step; return False where the system cannot."""
    if sys.platform != "linux":
        return False
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    done: int = renameat2(
        _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE)
    )
    return done == 0
