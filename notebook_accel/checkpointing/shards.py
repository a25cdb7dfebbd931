"""A model's weights in a folder, in files of limited size with an index."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from ..errors import CheckpointError
from . import names, pickled, rawio, weights
from .folder import PathLike, is_abandoned, make_token

_T = TypeVar("_T")
_UNITS: Final = {
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}
_SHARD: Final = re.compile(
    r"(model|pytorch_model)(-(?P<generation>\d{1,9}))?-\d{5}-of-\d{5}\.(safetensors|bin)"
)
_ROOTS: Final = (
    names.SAFE_MODEL,
    f"{names.SAFE_MODEL}.index.json",
    names.MODEL,
    f"{names.MODEL}.index.json",
)
"""The files by which readers find weights, in the order in which `find_files` looks for them."""
_STAGING: Final = ".notebook-accel-saving-"
"""How the folder begins, in that of the weights, where a save writes them."""
_LOCK: Final = ".notebook-accel-lock"
_ANY: Final = 10**8


def parse_size(size: int | str) -> int:
    """Return bytes of a number or of a text such as `5MB` or `10GiB`; ValueError for anything else."""
    if isinstance(size, int) and not isinstance(size, bool):
        number = size
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?B)\s*", str(size).upper())
        if match is None or match[2] not in _UNITS:
            raise ValueError(
                f"size {size!r} is neither a number of bytes nor a text such as '500MB', '10GB' or '2GiB'"
            )
        number = int(float(match[1]) * _UNITS[match[2]])
    if number <= 0:
        raise ValueError(f"size {size!r} is not positive")
    return number


def save_weights(
    state: Mapping[str, Any],
    folder: Path,
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
    check: Callable[[Path], None] = lambda written: None,
) -> list[Path]:
    """Write weights to a folder: one file, or several files with an index; return the files, the index last.

    A process may die at any instant: the folder then holds the old weights or the new ones, never a mixture. Shards
    get names that no index in the folder has, such as `model-2-00001-of-00003.safetensors` where the first names are
    taken: who has read an old index does not find new files under its names. Several processes may save to the folder:
    the weights of one of them stay, as a rule the last.

    Args:
        state: tensors by name. Names of the same memory are written once; safetensors files note the others.
        folder: made where there is none; weights in it are replaced, other files stay.
        max_shard_size: bytes of a file at most, see `parse_size`; a larger tensor has a file alone.
        safe_serialization: write safetensors, not files of torch.save.
        check: called with the folder that holds the written files, before they replace older ones; may raise.

    Raises:
        ValueError: `folder` is a file, the size is wrong, or a tensor has no values.
    """
    limit = parse_size(max_shard_size)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: weights are saved to a folder, choose another name")
    dropped: dict[str, str] = {}
    tensors: dict[str, Any] = dict(state)
    if safe_serialization:
        tensors, dropped = weights.without_ties(state)
    else:
        weights.check_values(state)
    shards = _split(tensors, limit)
    whole = names.SAFE_MODEL if safe_serialization else names.MODEL
    is_new = not folder.exists()
    files: list[str] = []
    undo: list[str] = []
    staging = folder / f"{_STAGING}{make_token()}"
    try:
        for path in folder.glob(f"{_STAGING}*"):
            if is_abandoned(path):
                shutil.rmtree(path, ignore_errors=True)
        staging.mkdir(parents=True)
        files = _choose_names(folder, whole, len(shards), _has_others(staging))
        for name, shard in zip(files, shards, strict=True):
            texts = {gone: kept for gone, kept in dropped.items() if kept in shard}
            with rawio.name_file(folder / name):
                if safe_serialization:
                    weights.write(staging / name, shard, texts)
                else:
                    pickled.write(staging / name, shard)
        if len(shards) > 1:
            files.append(f"{whole}.index.json")
            with rawio.name_file(folder / files[-1]):
                (staging / files[-1]).write_text(_index(files[:-1], shards), encoding="utf-8")
                rawio.sync(staging / files[-1])
        check(staging)
        with _lock(folder):
            undo = files[:-1]
            for name in undo:
                os.replace(staging / name, folder / name)
            rawio.sync(folder)
            undo = []
            _switch(staging, folder, files)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        for name in undo:
            (folder / name).unlink(missing_ok=True)
        if is_new:
            with contextlib.suppress(OSError):  # something is in it
                folder.rmdir()
        raise
    return [folder / name for name in files]


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Let one process at a time put its weights in place, one that dies gives the lock up."""
    path = folder / _LOCK
    with contextlib.ExitStack() as opened:
        while True:
            file = opened.enter_context(open(path, "w"))
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):  # the process before has removed it
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    break
            opened.pop_all().close()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _has_others(staging: Path) -> bool:
    """Return True where another process is saving to the folder."""
    return any(path != staging for path in staging.parent.glob(f"{_STAGING}*"))


def _choose_names(folder: Path, whole: str, count: int, has_others: bool) -> list[str]:
    """Return names for the files: those of Accelerate, with a number in front where such shards are there or listed.

    The number is any where another process chooses at the same time.
    """
    if count == 1:
        return [whole]
    known = [path.name for path in folder.iterdir()] + _read_indices(folder)
    used = [int(match["generation"] or 1) for text in known for match in _SHARD.finditer(text)]
    stem, _, ending = whole.partition(".")
    if used or has_others:
        stem = f"{stem}-{secrets.randbelow(_ANY) + _ANY if has_others else max(used) + 1}"
    return [f"{stem}-{number:05}-of-{count:05}.{ending}" for number in range(1, count + 1)]


def _read_indices(folder: Path) -> list[str]:
    found = []
    for root in _ROOTS:
        if root.endswith(".json"):
            with contextlib.suppress(FileNotFoundError):
                found.append((folder / root).read_text("utf-8", "replace"))
    return found


def _switch(staging: Path, folder: Path, files: list[str]) -> None:
    """Let the new weights count: one rename or removal does it for whoever reads the folder. Remove the old ones then.

    Args:
        staging: holds the last of the files, to which readers come first; the others have been moved.
        folder: of the weights.
        files: the new ones.
    """
    os.replace(staging / files[-1], folder / files[-1])
    rawio.sync(folder)
    staging.rmdir()
    old = [path.name for path in folder.iterdir() if is_weights(path.name) and path.name not in files]
    roots = [root for root in reversed(_ROOTS) if root in old]
    for name in [*roots, *sorted(set(old) - set(roots))]:
        (folder / name).unlink()
    rawio.sync(folder)


def is_weights(name: str) -> bool:
    """Return True for the name of a file that `save_weights` writes."""
    return name in _ROOTS or _SHARD.fullmatch(name) is not None


def _split(tensors: Mapping[str, Any], limit: int) -> list[dict[str, Any]]:
    """Return the entries in order, in parts of at most `limit` bytes or of one larger tensor."""
    shards: list[dict[str, Any]] = [{}]
    size = 0
    seen: dict[tuple[Any, ...], int] = {}
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            shards[-1][name] = value
            continue
        address = (value.device, value.untyped_storage().data_ptr())
        if value.nbytes and address in seen:  # tied tensors go to one file, which keeps them tied
            shards[seen[address]][name] = value
            continue
        if shards[-1] and size + value.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = value
        size += value.nbytes
        seen[address] = len(shards) - 1
    return shards


def _index(files: list[str], shards: list[dict[str, Any]]) -> str:
    total = sum(
        value.nbytes for shard in shards for value in shard.values() if isinstance(value, torch.Tensor)
    )
    places = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2, sort_keys=True)


def read_unchanged(checkpoint: PathLike, read: Callable[[], _T]) -> _T:
    """Return what a function reads from a checkpoint; call it again where a save has replaced the weights meanwhile.

    Args:
        checkpoint: see `find_files`.
        read: called without arguments.
    """
    while True:
        before = _identify(checkpoint)
        try:
            result = read()
        except (CheckpointError, OSError, ValueError):
            if _identify(checkpoint) == before:
                raise
        else:
            if _identify(checkpoint) == before:
                return result


def _identify(checkpoint: PathLike) -> list[tuple[str, int, int]]:
    """Return what changes when other weights are put in the place of these."""
    path = Path(checkpoint).expanduser()
    found = []
    for each in (path, *(path / root for root in _ROOTS)):
        with contextlib.suppress(OSError):
            if each.is_file():
                stat = each.stat()
                found.append((each.name, stat.st_ino, stat.st_mtime_ns))
    return found


def find_files(checkpoint: PathLike) -> list[Path]:
    """Return the weight files of a checkpoint: a file, an index, or a folder with one of them.

    ValueError if it is none of these, CheckpointError if an index is damaged or names a file that is missing.
    """
    path = Path(checkpoint).expanduser()
    if path.is_dir():
        # of both formats it is safetensors, which are checked and read faster
        found = [path / name for name in (names.SAFE_MODEL, names.MODEL) if (path / name).is_file()]
        indices = sorted(path.glob("*.index.json"))
        safe = [index for index in indices if index.name.endswith(".safetensors.index.json")]
        if found and (found[0].name == names.SAFE_MODEL or not safe):
            return found[:1]
        indices = safe or indices
        if len(indices) != 1:
            listed = ", ".join(index.name for index in indices) or "no *.index.json"
            raise ValueError(
                f"{path} holds {listed}: expected {names.SAFE_MODEL}, {names.MODEL} or one index"
            )
        path = indices[0]
    if not path.is_file():
        raise ValueError(f"{path} is neither a file of weights, nor an index, nor a folder with one")
    if path.suffix != ".json":
        return [path]
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        files = sorted(map(os.fspath, set(content.get("weight_map", content).values())))
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no index of weights: {error}") from error
    if not files:
        raise CheckpointError(f"{path} is no index of weights: it lists none")
    for name in files:
        if not os.path.isfile(path.parent / name):
            raise CheckpointError(f"{path.parent / name} is missing, though {path.name} lists it")
    return [path.parent / name for name in files]
