"""What DeepSpeed writes of a checkpoint, under the names that it and Accelerate give; and whole weights of shards."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any, Final

import torch

from ..checkpointing import gather, models, names, pickled
from ..checkpointing.together import Together
from ..checkpointing.write import Copies
from ..errors import CheckpointError
from ..topology import Topology

_FOLDER: Final = "pytorch_model"


def folder_name(index: int) -> str:
    """Return the name of the folder with the files of an engine: `pytorch_model`, `pytorch_model_1`."""
    return _FOLDER if index == 0 else f"{_FOLDER}_{index}"


def is_engine(model: Any) -> bool:
    """Return True for an engine that has something to train."""
    return hasattr(model, "save_checkpoint") and hasattr(model, "save_zero_checkpoint") and _trains(model)


def _trains(engine: Any) -> bool:
    return engine.optimizer is not None and engine.checkpoint_engine is not None


class EngineFiles(Together):
    """The files of all models: those of engines, which DeepSpeed writes, and rank 0's of others.

    Where DeepSpeed cannot write on one rank, it leaves the others waiting, until the group's timeout.
    """

    def __init__(self, prepared: Sequence[Any], states: Sequence[dict[str, Any]], is_main: bool) -> None:
        self._prepared = prepared
        self._states = states
        self._is_main = is_main

    def write(self, where: Path) -> None:
        for index, model in enumerate(self._prepared):
            if is_engine(model):
                model.save_checkpoint(str(where), tag=folder_name(index))
        # last: rank 0 alone may fail here, and no other waits for it
        for index, model in enumerate(self._prepared):
            if self._is_main and not is_engine(model):
                (file,) = gather.model_files([self._states[index]], safe_serialization=True)
                (where / folder_name(index)).mkdir(exist_ok=True)
                file.write(where / folder_name(index))

    def snapshot(self, copies: Copies) -> Together:
        raise ValueError(
            "DeepSpeed writes its part of a checkpoint itself, while nothing trains: leave async_save out"
        )


def plan(
    folder: Path, prepared: Sequence[Any], topology: Topology, deepspeed: Any
) -> list[Callable[[], None]]:
    """Check the files of all models, and return what loads them.

    Raises:
        CheckpointError: names the file that is missing or what does not fit.
    """
    stored = next(index for index in itertools.count() if not (folder / folder_name(index)).is_dir())
    if stored != len(prepared):
        raise CheckpointError(
            f"{folder} holds {stored} models that DeepSpeed saved, in folders {folder_name(0)} and so on, and this "
            f"accelerator has {len(prepared)}"
        )
    steps: list[Callable[[], None]] = []
    for index, model in enumerate(prepared):
        where = folder / folder_name(index)
        if is_engine(model):
            _check(where, model, topology)
            steps.append(functools.partial(_load, model, folder, folder_name(index)))
            continue
        source = models.open_source(where / names.SAFE_MODEL)
        if is_sharded(model):
            _check_shards(source, model)
            steps.append(functools.partial(_load_shards, source, model, deepspeed, topology.is_main))
        else:
            steps.append(models.plan(model, [source]))
    return steps


def _check(where: Path, engine: Any, topology: Topology) -> None:
    """Raise CheckpointError where DeepSpeed could not load: it would have changed something by then."""
    shards = sorted(where.glob("*zero_pp_rank_*_optim_states.pt"))
    if engine.zero_optimization() != bool(shards):
        was = "with" if shards else "without"
        raise CheckpointError(
            f"{where} was saved {was} ZeRO, and zero_stage is {engine.zero_optimization_stage()} here"
        )
    if shards and len(shards) != topology.world_size:
        raise CheckpointError(
            f"{where} was saved by {len(shards)} processes, and these are {topology.world_size}: ZeRO's shards fit the "
            "same number only; zero_to_fp32.py in the checkpoint makes whole weights of them"
        )
    path = where / "mp_rank_00_model_states.pt"
    if engine.zero_optimization_partition_weights():
        path = where / f"zero_pp_rank_{topology.rank}_mp_rank_00_model_states.pt"
    if not path.is_file():
        kind = "zero_stage 3" if "zero_pp" in path.name else "a zero_stage below 3"
        raise CheckpointError(f"{path} is missing: the checkpoint is not of {kind}, as this run is")
    saved = pickled.read(path, map_location="meta", weights_only=False, mmap=True)
    _check_names(path, engine.module_state_dict().keys(), saved["module"].keys())
    stored = {name: tuple(value.shape) for name, value in saved["module"].items() if hasattr(value, "shape")}
    if shards:  # where the tensors themselves may be parts
        stored = {name: tuple(size) for group in saved["param_shapes"] for name, size in group.items()}
    for name, item in engine.module.named_parameters():
        size = tuple(getattr(item, "ds_shape", item.shape))
        if stored.get(name, size) != size:
            raise CheckpointError(
                f"{path}: {name!r} has shape {list(stored[name])}, the model's {list(size)}"
            )


def _check_names(path: Path, own: Set[str], stored: Set[str]) -> None:
    for name in own - stored:
        raise CheckpointError(f"{path} has no key {name!r}")
    for name in stored - own:
        raise CheckpointError(f"{path} has the key {name!r}, which the model has not")


def _load(engine: Any, folder: Path, tag: str) -> None:
    path, _ = engine.load_checkpoint(str(folder), tag=tag)
    if path is None:
        raise CheckpointError(f"DeepSpeed could not load {folder / tag}")


def is_sharded(model: torch.nn.Module) -> bool:
    """Return True for the user's model where ZeRO 3 shares out its weights."""
    return any(hasattr(item, "ds_id") for item in model.parameters())


def _check_shards(source: models.Source, model: Any) -> None:
    for name, item in model.named_parameters():
        stored = source.shapes.get(source.twins.get(name, name))
        if stored is None:
            raise CheckpointError(f"{source.path} has no key {name!r}")
        own = tuple(getattr(item, "ds_shape", item.shape))
        if stored != own:
            raise CheckpointError(
                f"{source.path}: {name!r} has shape {list(stored)}, the model's {list(own)}"
            )


def _load_shards(source: models.Source, model: torch.nn.Module, deepspeed: Any, is_main: bool) -> None:
    """Give a sharded model without an optimizer its weights; rank 0 says them."""
    values = source.read()
    for name, item in model.named_parameters():
        with deepspeed.zero.GatheredParameters([item], modifier_rank=0):
            if is_main:
                item.data.copy_(values[source.twins.get(name, name)])
    for name, buffer in model.named_buffers():
        if name in values:
            buffer.copy_(values[name])


def gathered(deepspeed: Any, model: torch.nn.Module, *, keep: bool) -> dict[str, Any]:
    """Return the whole state of a model whose weights ZeRO 3 shares out; all processes call it.

    One module's own weights are whole at a time.

    Args:
        deepspeed: the library.
        model: the user's.
        keep: whether this process gets it; others get {}.
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
                    continue  # of a module in it
                key = f"{prefix}.{name}" if prefix else name
                if not isinstance(value, torch.Tensor):
                    state[key] = value
                    continue
                if id(value) not in shared:
                    shared[id(value)] = value.detach().to("cpu", copy=True)
                state[key] = shared[id(value)]
    return state
