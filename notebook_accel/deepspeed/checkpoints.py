"""DeepSpeed's part of a checkpoint, under Accelerate's file names; gathers weights that ZeRO 3 shards."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any, Final

import torch

from ..checkpointing import models, names, pickled, write
from ..checkpointing.copies import Copies
from ..checkpointing.manifest import Manifest
from ..checkpointing.parts import CollectiveFolder
from ..compilation import plain_name
from ..errors import CheckpointError
from ..topology import Topology
from . import resharding

_FOLDER: Final = "pytorch_model"
_RANK: Final = re.compile(r"zero_pp_rank_(\d+)_")
_LATEST: Final = "latest"
"""The file that tells DeepSpeed's tools which folder to read."""
_WRITING: Final = ("_save_checkpoint", "_save_moe_checkpoint", "_save_zero_checkpoint")
"""Methods of DeepSpeed's engine that write files and have no collectives."""


def folder_name(index: int) -> str:
    """Return the name of the folder with the files of an engine: `pytorch_model`, `pytorch_model_1`.

    Args:
        index: of the model, from 0 in the order of `prepare`.
    """
    return _FOLDER if index == 0 else f"{_FOLDER}_{index}"


def is_engine(model: Any) -> bool:
    """Return True for an engine with an optimizer; ZeRO 3 makes engines of models without one too.

    Args:
        model: a prepared model.
    """
    return (
        hasattr(model, "save_checkpoint") and hasattr(model, "save_zero_checkpoint") and _has_optimizer(model)
    )


def _has_optimizer(engine: Any) -> bool:
    return engine.optimizer is not None and engine.checkpoint_engine is not None


class EngineFiles(CollectiveFolder):
    """The files of all models: DeepSpeed writes those of engines, rank 0 writes the others.

    Args:
        prepared: engines and other models, in the order of `prepare`.
        states: the state of each model that is no engine; anything for an engine.
        rank: of this process.
    """

    def __init__(self, prepared: Sequence[Any], states: Sequence[dict[str, Any]], rank: int) -> None:
        self._prepared = prepared
        self._states = states
        self._rank = rank

    def write(self, where: Path) -> list[Path]:
        errors: list[Exception] = []
        for index, model in enumerate(self._prepared):
            if is_engine(model):
                with _hold_errors(model, errors):
                    model.save_checkpoint(str(where), tag=folder_name(index), save_latest=False)
        if errors:
            raise errors[0]
        # last, because rank 0 may fail here, and then no other rank waits for it
        for index, model in enumerate(self._prepared):
            if self._rank == 0 and is_engine(model):
                (where / _LATEST).write_text(folder_name(index))
            elif self._rank == 0:
                (file,) = write.model_files([self._states[index]], safe_serialization=True)
                (where / folder_name(index)).mkdir(exist_ok=True)
                file.write(where / folder_name(index))
        folders = [where / folder_name(index) for index in range(len(self._prepared))]
        written = [path for folder in folders for path in _files_in(folder)]
        return [path for path in written if _is_of_rank(path, self._rank)]

    def snapshot(self, copies: Copies) -> CollectiveFolder:
        raise ValueError(
            "DeepSpeed writes its part of a checkpoint itself, while nothing trains: leave async_save out"
        )


def _files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _is_of_rank(path: Path, rank: int) -> bool:
    """Return True for a file of DeepSpeed that this rank writes; rank 0 writes those that no rank has for itself."""
    match = _RANK.search(path.name)
    return rank == (int(match[1]) if match else 0)


@contextlib.contextmanager
def _hold_errors(engine: Any, errors: list[Exception]) -> Iterator[None]:
    """Return a context in which an engine that cannot write goes on, because other ranks wait for it.

    Args:
        engine: of DeepSpeed, whose `save_checkpoint` has collectives before, between and after the files (0.19).
        errors: gets what was raised.
    """

    def hold(action: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(action)
        def wrapper(*args: Any, **kwargs: Any) -> None:
            try:
                action(*args, **kwargs)
            except Exception as error:  # of any kind: the caller raises it once all ranks are done
                errors.append(error)

        return wrapper

    for name in _WRITING:
        setattr(engine, name, hold(getattr(engine, name)))
    try:
        yield
    finally:
        for name in _WRITING:
            delattr(engine, name)


def plan_loading(
    listed: Manifest, prepared: Sequence[Any], topology: Topology, deepspeed: Any
) -> list[Callable[[], None]]:
    """Check the files of all models, and return the functions that load them.

    Args:
        listed: the manifest of the checkpoint.
        prepared: engines and other models, in the order of `prepare`.
        topology: of this process.
        deepspeed: the library.

    Raises:
        CheckpointError: a file is missing or does not fit; the message names it.
    """
    folder, verify = listed.folder, functools.cache(listed.verify)
    stored = next(index for index in itertools.count() if not (folder / folder_name(index)).is_dir())
    if stored != len(prepared):
        raise CheckpointError(
            f"{folder} holds {stored} models that DeepSpeed saved, in folders {folder_name(0)} and so on, and this "
            f"accelerator has {len(prepared)}"
        )
    steps: list[Callable[[], None]] = []
    for index, model in enumerate(prepared):
        where = folder / folder_name(index)
        files = _files_in(where)
        for path in files:
            if _is_of_rank(path, topology.rank) or _RANK.search(path.name) is None:
                verify(path)
        if is_engine(model):
            reshared = None
            if not _check_engine(where, model, topology, verify):
                for path in files:
                    verify(path)
                reshared = resharding.reshare(where, model, topology.rank, topology.world_size)
            steps.append(functools.partial(_load_engine, model, folder, folder_name(index), reshared))
            continue
        source = models.open_source(where / names.SAFE_MODEL)
        if is_sharded(model):
            _check_shards(source, model)
            steps.append(functools.partial(_load_shards, source, model, deepspeed, topology.is_main))
        else:
            steps.append(models.plan(model, [source]))
    return steps


def _check_engine(where: Path, engine: Any, topology: Topology, verify: Callable[[Path], None]) -> bool:
    """Raise CheckpointError where DeepSpeed could not load, because it would fail in the middle of loading.

    Args:
        where: the folder of the engine's files.
        engine: to load them into.
        topology: of this process.
        verify: raises where a file has changed since it was written.

    Returns:
        Whether each process can load the shard of its own rank.
    """
    shards = sorted(where.glob("*zero_pp_rank_*_optim_states.pt"))
    if engine.zero_optimization() != bool(shards):
        was = "with" if shards else "without"
        raise CheckpointError(
            f"{where} was saved {was} ZeRO, and zero_stage is {engine.zero_optimization_stage()} here"
        )
    path = where / "mp_rank_00_model_states.pt"
    if engine.zero_optimization_partition_weights():
        rank = topology.rank if len(shards) == topology.world_size else 0
        path = where / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
    if not path.is_file():
        kind = "zero_stage 3" if "zero_pp" in path.name else "a zero_stage below 3"
        raise CheckpointError(f"{path} is missing: the checkpoint is not of {kind}, as this run is")
    verify(path)
    saved = pickled.read(path, map_location="meta", weights_only=False, mmap=True)
    _check_names(path, engine.module_state_dict().keys(), saved["module"].keys())
    stored = {name: tuple(value.shape) for name, value in saved["module"].items() if hasattr(value, "shape")}
    if shards:  # then a tensor may be only a part of a weight
        stored = {name: tuple(size) for group in saved["param_shapes"] for name, size in group.items()}
    for name, item in engine.module.named_parameters():
        size = tuple(getattr(item, "ds_shape", item.shape))
        if stored.get(name, size) != size:
            raise CheckpointError(
                f"{path}: {name!r} has shape {list(stored[name])}, the model's {list(size)}"
            )
    return not shards or (len(shards) == topology.world_size and resharding.has_order(engine, saved))


def _check_names(path: Path, own: Set[str], stored: Set[str]) -> None:
    for name in own - stored:
        raise CheckpointError(f"{path} has no key {name!r}")
    for name in stored - own:
        raise CheckpointError(f"{path} has the key {name!r}, which the model has not")


def _load_engine(engine: Any, folder: Path, tag: str, reshared: resharding.Reshared | None) -> None:
    with contextlib.nullcontext() if reshared is None else reshared.replace_files(engine):
        path, _ = engine.load_checkpoint(str(folder), tag=tag)
    if path is None:
        raise CheckpointError(f"DeepSpeed could not load {folder / tag}")


def is_sharded(model: torch.nn.Module) -> bool:
    """Return True for the user's model if ZeRO 3 shards its weights."""
    return any(hasattr(item, "ds_id") for item in model.parameters())


def _check_shards(source: models.Source, model: Any) -> None:
    for full, item in model.named_parameters():
        name = plain_name(full)
        stored = source.shapes.get(source.twins.get(name, name))
        if stored is None:
            raise CheckpointError(f"{source.path} has no key {name!r}")
        own = tuple(getattr(item, "ds_shape", item.shape))
        if stored != own:
            raise CheckpointError(
                f"{source.path}: {name!r} has shape {list(stored)}, the model's {list(own)}"
            )
    source.verify(source.shapes)


def _load_shards(source: models.Source, model: torch.nn.Module, deepspeed: Any, is_main: bool) -> None:
    """Load the weights of a sharded model without an optimizer; the values are those of rank 0."""
    values = source.read()
    for full, item in model.named_parameters():
        name = plain_name(full)
        with deepspeed.zero.GatheredParameters([item], modifier_rank=0):
            if is_main:
                item.data.copy_(values[source.twins.get(name, name)])
    for full, buffer in model.named_buffers():
        name = plain_name(full)
        if name in values:
            buffer.copy_(values[name])


def gather_state(deepspeed: Any, model: torch.nn.Module, *, keep: bool) -> dict[str, Any]:
    """Return the whole state of a model whose weights ZeRO 3 shards; every process has to call it.

    It gathers the weights of one module after the other, to save memory.

    Args:
        deepspeed: the library.
        model: the user's.
        keep: whether this process keeps the state.

    Returns:
        Tensors on the CPU by name; {} in a process that does not keep it.
    """
    state: dict[str, Any] = {}
    shared: dict[int, torch.Tensor] = {}
    for prefix, part in model.named_modules(remove_duplicate=False):
        own = list(part.parameters(recurse=False))
        with deepspeed.zero.GatheredParameters(own, enabled=bool(own)):
            if not keep:
                continue
            for name, value in part.state_dict(keep_vars=True).items():
                if "." in name:
                    continue  # it belongs to a submodule
                key = plain_name(f"{prefix}.{name}" if prefix else name)
                if not isinstance(value, torch.Tensor):
                    state[key] = value
                    continue
                if id(value) not in shared:
                    shared[id(value)] = value.detach().to("cpu", copy=True)
                state[key] = shared[id(value)]
    return state
