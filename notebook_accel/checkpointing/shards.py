"""A model's weights in a folder, in files of limited size with an index, and back into a model."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from ..errors import CheckpointError
from . import models, names, pickled, rawio, weights
from .project import PathLike

_UNITS: Final = {
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}
_SHARD: Final = re.compile(r"(model|pytorch_model)-\d{5}-of-\d{5}\.(safetensors|bin)")


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
) -> None:
    """Write weights to a folder: one file, or files of at most this size with an index.

    Names of the same memory are written once; safetensors files note the names left out. A process that dies
    leaves a whole set of files behind: new files get their names once all are written, the index last.
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
    stem, _, ending = whole.partition(".")
    files = (
        [whole]
        if len(shards) == 1
        else [f"{stem}-{number:05}-of-{len(shards):05}.{ending}" for number in range(1, len(shards) + 1)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    try:
        for name, shard in zip(files, shards, strict=True):
            part = folder / f"{name}.part"
            written.append(part)
            if safe_serialization:
                texts = {gone: kept for gone, kept in dropped.items() if kept in shard}
                weights.write(part, shard, texts)
            else:
                pickled.write(part, shard)
        index = folder / f"{whole}.index.json.part"
        if len(shards) > 1:
            written.append(index)
            index.write_text(_index(files, shards), encoding="utf-8")
            rawio.sync(index)
    except BaseException:
        for part in written:
            part.unlink(missing_ok=True)
        raise
    _publish(folder, written)


def _publish(folder: Path, written: list[Path]) -> None:
    for part in written:
        os.replace(part, part.with_suffix(""))
    keep = {part.with_suffix("").name for part in written}
    for path in folder.iterdir():
        if is_weights(path.name) and path.name not in keep:
            path.unlink()
    rawio.sync(folder)


def is_weights(name: str) -> bool:
    """Return True for the name of a file that `save_weights` writes."""
    whole = name.removesuffix(".index.json") in (names.SAFE_MODEL, names.MODEL)
    return whole or _SHARD.fullmatch(name) is not None


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


def find_files(checkpoint: PathLike) -> list[Path]:
    """Return the weight files of a checkpoint: a file, an index, or a folder with one of them.

    ValueError if it is none of these, CheckpointError if an index is damaged or names a file that is missing.
    """
    path = Path(checkpoint).expanduser()
    if path.is_dir():
        found = [path / name for name in (names.MODEL, names.SAFE_MODEL) if (path / name).is_file()]
        if found:
            return found[:1]
        indices = sorted(path.glob("*.index.json"))
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
        files = sorted(set(content.get("weight_map", content).values()))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path} is no index of weights: {error}") from error
    for name in files:
        if not (path.parent / name).is_file():
            raise CheckpointError(f"{path.parent / name} is missing, though {path.name} lists it")
    return [path.parent / name for name in files]


def load_checkpoint_in_model(
    model: torch.nn.Module,
    checkpoint: PathLike,
    device_map: Any = None,
    offload_folder: Any = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: list[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load the weights of a file, an index or a folder into a model; nothing changes where they do not fit.

    Args:
        model: not wrapped.
        checkpoint: a safetensors file or one of torch.save, an index of several, or a folder with one of these.
        device_map: not supported yet, as are the arguments about offloading and about broadcasting.
        offload_folder: see `device_map`.
        dtype: cast the model's floating point tensors to it first.
        offload_state_dict: see `device_map`.
        offload_buffers: see `device_map`.
        keep_in_fp32_modules: with `dtype` float16, names of modules that get float32.
        offload_8bit_bnb: see `device_map`.
        strict: refuse names that are missing or unknown.
        full_state_dict: False is not supported yet.
        broadcast_from_rank0: see `device_map`.

    Raises:
        CheckpointError: the weights are damaged or do not fit; it names the file and the name.
        NotImplementedError: an argument is not supported yet.
    """
    _refuse(
        device_map=device_map,
        offload_folder=offload_folder,
        offload_state_dict=offload_state_dict or None,
        offload_buffers=offload_buffers or None,
        offload_8bit_bnb=offload_8bit_bnb or None,
        full_state_dict=None if full_state_dict else False,
        broadcast_from_rank0=broadcast_from_rank0 or None,
    )
    chosen = _dtype(dtype)
    sources = [models.open_source(path) for path in find_files(checkpoint)]
    apply = models.plan(model, sources, strict=strict)
    if not strict:
        known = set(model.state_dict())
        if unknown := sorted({name for source in sources for name in source.shapes} - known):
            warnings.warn(f"{checkpoint} has weights that the model does not use: {unknown}", stacklevel=2)
    if chosen is not None:
        _cast(model, chosen, keep_in_fp32_modules or [])
        apply = models.plan(model, sources, strict=strict)
    apply()


def load_state_dict(checkpoint_file: PathLike, device_map: Any = None) -> dict[str, Any]:
    """Return the weights in a file by name, on the CPU; CheckpointError if it is damaged.

    A `device_map` is not supported yet.
    """
    _refuse(device_map=device_map)
    path = Path(checkpoint_file).expanduser()
    if path.suffix == ".safetensors":
        return dict(weights.read(path))
    content: dict[str, Any] = pickled.read(path)
    return content


def _refuse(**arguments: Any) -> None:
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise NotImplementedError(f"{', '.join(given)}: not supported yet, leave it out")


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(
            f"dtype {dtype!r} is unknown, choose a dtype of torch such as 'float16' or 'bfloat16'"
        )
    return found


def _cast(model: torch.nn.Module, dtype: torch.dtype, keep: list[str]) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not tensor.is_floating_point():
            continue
        kept = dtype == torch.float16 and any(name == part or f"{part}." in name for part in keep)
        tensor.data = tensor.data.to(torch.float32 if kept else dtype)
