"""Ordinary weights made of a sharded checkpoint: torch's distributed one, as FSDP writes it, or files with an index."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from .. import runtime
from ..compilation import plain_name
from ..errors import CheckpointError
from . import folder, manifest, models, rawio, shards
from .folder import PathLike

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

_METADATA: Final = ".metadata"
_MODEL: Final = "model"
_OPTIMIZER: Final = ("optimizer", "optim", "state", "param_groups")
_WHOLE: Final = 2**63


def merge_weights(
    checkpoint: PathLike,
    output: PathLike,
    *,
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Merge a sharded checkpoint into ordinary weights, and return the files.

    The files are written under other names, read back and compared, and renamed at the end; an index is the last. A
    process that dies leaves the weights that were there before, or the new ones. All are in memory meanwhile.

    Args:
        checkpoint: a folder of torch.distributed.checkpoint, which is read with pickle: one that you trust; or a
            folder of weights with an index. If it holds several things, such as a model and its optimizer, what
            is below `model` is merged.
        output: a folder, made where it is missing.
        safe_serialization: write `model.safetensors` instead of `pytorch_model.bin`.
        remove_checkpoint_dir: remove the checkpoint in the end.
        max_shard_size: bytes, or a text such as `5GB`; files of at most this size, and one file by default.
        overwrite: replace weights that the output has already.

    Raises:
        ValueError: there is no such checkpoint, or the output is in the way.
        CheckpointError: the checkpoint is damaged, or what was written is not what was read.
    """
    limit = _WHOLE if max_shard_size is None else shards.parse_size(max_shard_size)
    source, target = folder.resolve(checkpoint), folder.resolve(output)
    _check_places(source, target, remove_checkpoint_dir, overwrite)
    state = _read(source)

    def check(written: Path) -> None:
        _verify(written, state)

    files = shards.save_weights(state, target, limit, safe_serialization, check)
    if remove_checkpoint_dir:
        folder.remove(source)
    return files


def merge_fsdp_weights(
    checkpoint_dir: PathLike,
    output_path: PathLike,
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
    *,
    overwrite: bool = False,
) -> None:
    """Merge the shards that FSDP saved into one file of weights.

    In a run of several processes every rank calls it: rank 0 merges, and all return when the weights are there.

    Args:
        checkpoint_dir: folder with the shards; it is read with pickle: one that you trust.
        output_path: folder for the weights, made where it is missing.
        safe_serialization: write `model.safetensors` instead of `pytorch_model.bin`.
        remove_checkpoint_dir: remove the shards in the end.
        overwrite: replace weights that the folder has already.

    Raises:
        ValueError: see `merge_weights`.
        CheckpointError: see `merge_weights`; and on other ranks, where rank 0 raised anything.
    """
    run = runtime.current()
    failure: Exception | None = None
    if run is None or run.comm.rank == 0:
        try:
            merge_weights(
                checkpoint_dir,
                output_path,
                safe_serialization=safe_serialization,
                remove_checkpoint_dir=remove_checkpoint_dir,
                overwrite=overwrite,
            )
        except Exception as error:  # the others wait for the outcome
            failure = error
    text = None if failure is None else str(failure)
    if run is not None:
        text = run.comm.broadcast_object(text)
    if failure is not None:
        raise failure
    if text is not None:
        raise CheckpointError(f"rank 0 could not merge the weights: {text}")


def _check_places(source: Path, target: Path, remove: bool, overwrite: bool) -> None:
    if not source.is_dir():
        raise ValueError(f"{source} is no folder: name the folder of a sharded checkpoint")
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file: weights are saved to a folder, choose another name")
    if target == source or (remove and source in target.parents):
        raise ValueError(
            f"{target} is the checkpoint {source} or in it: choose another folder for the weights"
        )
    if remove and (source == Path.cwd() or source in Path.cwd().parents):
        raise ValueError(
            f"{source} holds the working folder and cannot be removed: leave it, or change the folder"
        )
    present = (
        [path.name for path in target.iterdir() if shards.is_weights(path.name)] if target.exists() else []
    )
    if present and not overwrite:
        raise ValueError(
            f"{target} has weights already ({', '.join(sorted(present)[:3])}): overwrite=True or --force replaces them"
        )


def _read(source: Path) -> dict[str, Any]:
    """Return the weights by name; names of the same memory in the files share it here too."""
    if (source / _METADATA).is_file():
        return _read_distributed(source)
    below = sorted(path.parent.name for path in source.glob(f"*/{_METADATA}"))
    likely = [name for name in below if not name.startswith("optimizer")] or below
    try:
        files = shards.find_files(source)
    except ValueError as error:
        if below:
            raise ValueError(
                f"{source} holds several checkpoints, {', '.join(below)}: name the model's, {source / likely[0]}"
            ) from error
        raise ValueError(
            f"{source} is no sharded checkpoint: it has no {_METADATA} of torch.distributed.checkpoint and no "
            "index of weights"
        ) from error
    state: dict[str, Any] = {}
    for opened in [models.open_source(path) for path in files]:
        state |= opened.read()
        for gone, kept in opened.twins.items():
            if kept in state:
                state.setdefault(gone, state[kept])
    return state


def _read_distributed(source: Path) -> dict[str, Any]:
    from torch.distributed import checkpoint as dcp  # half a second, for this alone
    from torch.distributed.checkpoint.metadata import Metadata

    listed = manifest.read(source.parent)  # of save_state; in other folders there is none
    listed.verify(source / _METADATA)
    reader = dcp.FileSystemReader(source)
    with _refuse_damage(source):
        metadata = reader.read_metadata()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"{_METADATA} holds a {type(metadata).__name__}")
    wanted = _names(source, metadata)
    if missing := _missing_files(source, metadata):
        raise CheckpointError(f"{source / missing[0]} is missing, though {_METADATA} lists it")
    for name in _files(metadata):
        listed.verify(source / name)
    state: dict[str, Any] = {}
    for key in wanted:
        entry: Any = metadata.state_dict_metadata[key]
        state[key] = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
    with _refuse_damage(source), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it loads in one process, which is intended
        dcp.load(state, storage_reader=reader, no_dist=True)
    return {name: state[key] for key, name in wanted.items()}


@contextlib.contextmanager
def _refuse_damage(source: Path) -> Iterator[None]:
    """Raise CheckpointError for whatever torch raises where files are damaged or not its own."""
    from torch.distributed import checkpoint as dcp

    try:
        yield
    except (Exception, dcp.CheckpointException) as error:  # the latter is no Exception
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"{source} is cut off or no checkpoint of torch: {lines[-1]}") from error


def _files(metadata: Metadata) -> list[str]:
    places = metadata.storage_data or {}
    return sorted({str(place.relative_path) for place in places.values() if hasattr(place, "relative_path")})


def _missing_files(source: Path, metadata: Metadata) -> list[str]:
    return [name for name in _files(metadata) if not (source / name).is_file()]


def _names(source: Path, metadata: Metadata) -> dict[str, str]:
    """Return the weights' names by those that they have in the checkpoint."""
    paths: Mapping[str, tuple[Any, ...]] = metadata.planner_data or {}
    entries = metadata.state_dict_metadata
    full = {key: tuple(map(str, paths.get(key) or (key,))) for key in entries}
    below = {key: path[path.index(_MODEL) + 1 :] for key, path in full.items() if _MODEL in path[:-1]}
    if not below and any(part in _OPTIMIZER for path in full.values() for part in path[:-1]):
        raise ValueError(f"{source} holds an optimizer's state and no model's")
    full = below or full
    if others := [key for key in full if not hasattr(entries[key], "size")]:
        raise ValueError(
            f"{source} holds {others[0]!r}, which is no tensor: such a checkpoint cannot become weights"
        )
    if not full:
        raise ValueError(f"{source} holds no tensors")
    return {key: plain_name(".".join(path)) for key, path in full.items()}


def _verify(staging: Path, state: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless the written files hold every value."""
    left = set(state)
    for path in shards.find_files(staging):
        source = models.open_source(path)
        content = None if source.header is not None else source.read()
        for name in source.shapes if content is None else content:
            if content is not None:
                written = content[name]
            else:
                assert source.header is not None
                entry = source.header.entries[name]
                written = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
                rawio.read_at(path, [(entry.offset, written)])
            if not _is_same(written, state[name]):
                raise CheckpointError(f"{path}: {name!r} was read back with other values: is the disk sound?")
            left.discard(name)
        left -= {gone for gone, kept in source.twins.items() if kept in source.shapes}
    if left:
        raise CheckpointError(f"{staging}: {sorted(left)[0]!r} was not written")


def _is_same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and bool(one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return rawio.memory(one.contiguous()) == rawio.memory(
        other.contiguous()
    )  # bytes, so that NaN equals itself
