"""A checkpoint's folder: written under another name, put in its place whole, and found again after a crash.

Files are written to `NAME.saving`, which is then exchanged with `NAME` and removed. Systems that cannot exchange two
folders in one step need two renames: between them `NAME.previous` holds the old checkpoint. A process may die at any
instant: either `NAME` is whole, or `recover` brings it back.
"""

from __future__ import annotations

import ctypes
import glob
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import manifest, names, rawio

PathLike = str | os.PathLike[str]

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def staging(target: Path) -> Path:
    """Return the folder in which the checkpoint is written."""
    return target.with_name(f"{target.name}.saving")


def previous(target: Path) -> Path:
    """Return the folder that holds the old checkpoint between two renames."""
    return target.with_name(f"{target.name}.previous")


def resolve(path: PathLike) -> Path:
    """Return the absolute path of a checkpoint; for a link, that of the folder it leads to."""
    target = Path(os.path.abspath(Path(path).expanduser()))
    return Path(os.path.realpath(target)) if target.is_symlink() else target


def barrier_files(target: Path, token: str) -> Path:
    """Return the folder for the files by which ranks wait for each other in the background.

    Args:
        target: the checkpoint's folder.
        token: of this save alone; the same on all ranks.
    """
    return target.with_name(f"{target.name}.meeting-{token}")


def check(target: Path) -> None:
    """Raise ValueError if a checkpoint cannot be there: at a file, a mount point, or around the working folder."""
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file: a checkpoint is a folder, choose another name")
    inside = target == Path.cwd() or target in Path.cwd().parents
    if inside or os.path.ismount(target):
        kind = "the working folder or above it" if inside else "a mount point"
        raise ValueError(
            f"{target} is {kind}, which cannot be replaced in one step: save to a folder below it"
        )


def recover(target: Path) -> None:
    """Bring back the old checkpoint where a process died between two renames."""
    if not target.exists() and previous(target).is_dir():
        try:
            os.rename(previous(target), target)
        except FileNotFoundError:  # another process was faster
            return


def remove_unfinished(target: Path) -> None:
    """Remove what a save has left that did not come to its end; the checkpoint before it, or its own, is whole then."""
    recover(target)
    remove(staging(target))
    remove(previous(target))


def prepare(target: Path, token: str | None = None) -> None:
    """Make an empty folder to write the checkpoint in.

    Args:
        target: the checkpoint's folder.
        token: of this save alone, the same on all ranks: leaves a mark for `is_prepared` in it.
    """
    remove_unfinished(target)
    for left in target.parent.glob(f"{glob.escape(target.name)}.meeting-*"):  # by processes that were killed
        shutil.rmtree(left, ignore_errors=True)
    staging(target).mkdir(parents=True)
    if token is not None:
        _mark(target, token).touch()


def is_prepared(target: Path, token: str) -> bool:
    """Return True where this process sees the folder that another one prepared.

    Args:
        target: the checkpoint's folder.
        token: see `prepare`.
    """
    try:
        # asks the server of a network disk; a lookup may be answered by what this machine remembers
        os.mkdir(staging(target))
    except FileExistsError:
        return _mark(target, token).exists()
    except OSError:  # the folder around it is missing
        return False
    os.rmdir(staging(target))
    return False


def unmark(target: Path, token: str) -> None:
    """Remove the mark of `prepare`, once all ranks have looked for it."""
    _mark(target, token).unlink(missing_ok=True)


def _mark(target: Path, token: str) -> Path:
    return staging(target) / f".prepared-{token}"


def commit(target: Path, facts: Mapping[str, Any], keep: int | None = None) -> None:
    """Put the written folder in its place, durably.

    Files in the old folder that no checkpoint is made of stay: they are linked into the new one first.

    Args:
        target: the checkpoint's folder.
        facts: what the manifest says besides the sizes of files.
        keep: how many automatically named checkpoints stay beside each other; None for all.
    """
    new = staging(target)
    manifest.write(new, facts)
    if target.exists():
        _carry(target, new)
    rawio.sync_tree(new)
    _put_in_place(new, target)
    if keep is not None:
        for _, path in names.checkpoints(target.parent)[:-keep]:
            if path != target:
                remove(path)


def _put_in_place(new: Path, target: Path) -> None:
    """Exchange the folders; files in the old one that were added meanwhile are carried over too."""
    if not target.exists():
        os.rename(new, target)
        rawio.sync(target.parent)
        return
    old = new
    if not _exchange(new, target):
        old = previous(target)
        os.rename(target, old)
        os.rename(new, target)
    rawio.sync(target.parent)
    _carry(old, target)
    remove(old)


def remove(folder: Path) -> None:
    """Remove a folder. It gets another name first, so that half of it is never taken for a checkpoint."""
    if folder.is_symlink():  # to a checkpoint that was put elsewhere by hand
        folder.unlink()
        return
    if not folder.exists():
        return
    doomed = folder.with_name(f"{folder.name}.removing")
    if folder.suffix not in (".saving", ".previous"):
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(folder, doomed)
        folder = doomed
    shutil.rmtree(folder)


def _carry(source: Path, into: Path, top: bool = True) -> None:
    for entry in os.scandir(source):
        if top and names.is_ours(entry.name):
            continue
        there = into / entry.name
        if entry.is_dir(follow_symlinks=False):
            there.mkdir(exist_ok=True)
            _carry(Path(entry.path), there, top=False)
        elif not os.path.lexists(there):
            try:
                os.link(entry.path, there, follow_symlinks=False)
            except (OSError, NotImplementedError):  # a file system without hard links
                shutil.copy2(entry.path, there, follow_symlinks=False)


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
