"""Shards of models and optimizers in a checkpoint, by torch.distributed.checkpoint: each rank writes its part.

The folders and the names in them are Accelerate's. A run of any number of processes reads them, sharded or not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from .. import fp8
from ..compilation import plain_name
from ..dtensors import from_local, is_sharded, to_local
from ..errors import CheckpointError
from . import models, names, optimizers
from .copies import Copies
from .manifest import Manifest
from .models import Apply
from .parts import CollectiveFolder, Parts

_METADATA: Final = ".metadata"
_SHOWN: Final = 3
_Path = tuple[str | int, ...]
"""Keys of nested dicts, and places in lists."""


class Shards(CollectiveFolder):
    """A folder that all ranks write.

    Args:
        name: of the folder.
        state: nested dicts of tensors, each rank its part, and of plain values.
        background: returns the process group of threads; all ranks call it.
        group: of all ranks, in which they agree; None for the default one.
    """

    def __init__(
        self, name: str, state: dict[str, Any], background: Callable[[], Any], group: Any = None
    ) -> None:
        self._name = name
        self._state = state
        self._background = background
        self._group = group

    def write(self, where: Path) -> list[Path]:
        save(self._state, where / self._name, self._group)
        rank = torch.distributed.get_rank(self._group) if torch.distributed.is_initialized() else 0
        own = sorted((where / self._name).glob(f"__{rank}_*"))
        return [*own, where / self._name / _METADATA] if rank == 0 else own

    def snapshot(self, copies: Copies) -> Shards:
        group = self._background()  # a collective: before what may fail on one rank
        return Shards(self._name, _copy_tree(self._state, copies), self._background, group)


def save(state: dict[str, Any], folder: Path, group: Any = None) -> None:
    """Write a folder by torch.distributed.checkpoint; all ranks call it.

    Args:
        state: nested dicts of tensors, each rank its part, and of plain values.
        folder: what to write.
        group: of all ranks; None for the default one.

    Raises:
        CheckpointError: on all ranks, with the same text, where one cannot write its part.
    """
    from torch.distributed import checkpoint as dcp

    class Writer(dcp.FileSystemWriter):
        """Raises what the system said: torch's zip writer hides it in an error that loses it on its way to a rank."""

        def write_data(self, plan: Any, planner: Any) -> Any:
            with _raise_cause():
                return super().write_data(plan, planner)

    try:
        dcp.save(state, storage_writer=Writer(folder), process_group=group)
    except dcp.CheckpointException as error:  # is no Exception
        raise CheckpointError(f"{folder} was not written: {_failures(error)}") from error


@contextmanager
def _raise_cause() -> Iterator[None]:
    """Raise the OSError by which another error came to be, in its place."""
    try:
        yield
    except RuntimeError as error:
        cause = error.__context__
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        if cause is None:
            raise
        raise cause from None


def _copy_tree(tree: Any, copies: Copies) -> Any:
    if isinstance(tree, dict):
        return {key: _copy_tree(value, copies) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_copy_tree(value, copies) for value in tree]
    if is_sharded(tree):
        return from_local(copies.of(to_local(tree)), tree)
    return copies.of(tree)


def model_folders(weights: Sequence[dict[str, Any]], background: Callable[[], Any]) -> list[CollectiveFolder]:
    """Return a folder for the sharded state of each model.

    Args:
        weights: the state of each model, of which each rank has its part.
        background: returns the process group of threads; all ranks call it.
    """
    return [
        Shards(names.sharded_model(index), {"model": state}, background)
        for index, state in enumerate(weights)
    ]


def optimizer_folders(
    models: Sequence[torch.nn.Module], optimizers: Sequence[Any], background: Callable[[], Any]
) -> list[CollectiveFolder]:
    """Return a folder for the sharded state of each optimizer, with parameters by name.

    Args:
        models: without wrappers; they name the parameters.
        optimizers: of torch.
        background: returns the process group of threads; all ranks call it.

    Raises:
        ValueError: no model has a parameter of an optimizer.
    """
    known = parameter_names(models)
    folders: list[CollectiveFolder] = []
    for index, optimizer in enumerate(optimizers):
        state = {
            _name_of(parameter, known): dict(values)
            for parameter, values in optimizer.state.items()
            if values
        }
        groups = [
            {**group, "params": [_name_of(parameter, known) for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
        content = {"optimizer": {"state": state, "param_groups": groups}}
        folders.append(Shards(names.sharded_optimizer(index), content, background))
    return folders


def parameter_names(models: Sequence[torch.nn.Module]) -> dict[int, str]:
    """Return the names of all models' parameters by their ids, those of later models with its number in front."""
    known: dict[int, str] = {}
    for index, model in enumerate(models):
        prefix = f"{index}." if index else ""
        for name, parameter in model.named_parameters():
            known.setdefault(id(parameter), prefix + plain_name(name))
    return known


def _name_of(parameter: torch.Tensor, known: dict[int, str]) -> str:
    name = known.get(id(parameter))
    if name is None:
        raise ValueError(
            f"an optimizer has a parameter of shape {list(parameter.shape)} that no prepared model has: prepare its "
            "model too, or choose FULL_STATE_DICT"
        )
    return name


def plan(listed: Manifest, parts: Parts) -> list[Apply] | None:
    """Check sharded models and optimizers against the objects to load them into.

    Args:
        listed: the manifest of the checkpoint.
        parts: the objects; models without wrappers.

    Returns:
        What loads them; None where the folder has no shards.

    Raises:
        CheckpointError: names the folder, and the key, that is missing, damaged or does not fit.
    """
    folder = listed.folder
    if not any((folder / name(0)).is_dir() for name in (names.sharded_model, names.sharded_optimizer)):
        return None
    for name_of, objects, what in (
        (names.sharded_model, parts.models, "models"),
        (names.sharded_optimizer, parts.optimizers, "optimizers"),
    ):
        stored = 0
        while (folder / name_of(stored)).is_dir():
            stored += 1
        if stored != len(objects):
            raise CheckpointError(f"{folder} holds {stored} {what}, and this accelerator has {len(objects)}")
    steps = [
        _plan_model(listed, folder / names.sharded_model(index), model)
        for index, model in enumerate(parts.models)
    ]
    known = parameter_names(parts.owners)
    for index, optimizer in enumerate(parts.optimizers):
        steps.append(_plan_optimizer(listed, folder / names.sharded_optimizer(index), optimizer, known))
    return steps


def _entries(listed: Manifest, folder: Path, top: str) -> dict[_Path, tuple[str, Any]]:
    """Return key and metadata of all entries below `top`, by their path there."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.metadata import Metadata

    if (folder / _METADATA).is_file():
        listed.verify(folder / _METADATA)
    try:
        metadata = dcp.FileSystemReader(folder).read_metadata()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds a {type(metadata).__name__}")
    except Exception as error:  # unpickling raises anything
        raise CheckpointError(f"{folder / _METADATA} is missing or damaged: {error!r}") from error
    paths: Any = metadata.planner_data or {}
    found: dict[_Path, tuple[str, Any]] = {}
    for key, entry in metadata.state_dict_metadata.items():
        whole = paths.get(key) or (key,)
        path = tuple(plain_name(part) if isinstance(part, str) else part for part in whole)
        if path[0] != top:
            raise CheckpointError(f"{folder} holds {key!r}, which is no part of a {top}")
        found[path[1:]] = (key, entry)
    _check_files(folder, (metadata.storage_data or {}).values())
    return found


def _check_files(folder: Path, places: Iterable[Any]) -> None:
    """Raise CheckpointError where a file is missing or ends before what it has to hold."""
    least: dict[str, int] = {}
    for place in places:
        least[place.relative_path] = max(least.get(place.relative_path, 0), place.offset + place.length)
    for name, size in least.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing, though {_METADATA} lists it")
        if file.stat().st_size < size:
            raise CheckpointError(f"{file} has {file.stat().st_size} bytes, {_METADATA} says {size} or more")


def _plan_model(listed: Manifest, folder: Path, model: torch.nn.Module) -> Apply:
    state = models.plain_state(model)
    others = {name for name, value in state.items() if not isinstance(value, torch.Tensor)}
    entries: dict[str, dict[_Path, tuple[str, Any]]] = {}
    for path, item in _entries(listed, folder, "model").items():
        # a module's own extra state may be nested
        name, rest = (path[0], path[1:]) if path[0] in others else (".".join(map(str, path)), ())
        entries.setdefault(str(name), {})[rest] = item
    empty = {name for name in others - entries.keys() if state[name] == {}}  # of which nothing is stored
    _compare(folder, state.keys() - empty, set(entries), "the model")
    others -= empty
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    for name, value in tensors.items():
        _check_shape(folder, name, entries[name][()][1], value)

    def make_target() -> dict[str, Any]:
        target: dict[str, Any] = {entries[name][()][0]: value for name, value in tensors.items()}
        for name in others:
            target |= {key: _room_for(entry, None) for key, entry in entries[name].values()}
        return target

    _verify(listed, folder, make_target())

    def apply() -> None:
        target = make_target()
        with torch.no_grad():
            _read(folder, target)
        if others:
            own = {name: _nest(target, entries[name]) for name in others}
            model.load_state_dict(own, strict=False)

    return apply


def _plan_optimizer(listed: Manifest, folder: Path, optimizer: Any, known: dict[int, str]) -> Apply:
    entries = _entries(listed, folder, "optimizer")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = {_name_of(parameter, known): number for number, parameter in enumerate(parameters)}
    stored: dict[str, dict[_Path, tuple[str, Any]]] = {}
    for path, item in entries.items():
        if path[0] == "state":
            stored.setdefault(str(path[1]), {})[path[2:]] = item
    if unknown := sorted(set(stored) - set(numbers)):
        raise CheckpointError(f"{folder} has state for {_some(unknown)}, which the optimizer does not train")
    groups = _groups(listed, folder, entries, optimizer, numbers)
    optimizers.check_kind(
        folder, optimizer, groups, [(repr(name), {path[0] for path in own}) for name, own in stored.items()]
    )
    for name, own in stored.items():
        for path, (_, entry) in own.items():
            value = optimizer.state.get(parameters[numbers[name]], {}).get(path[0])
            if len(path) == 1 and isinstance(value, torch.Tensor):
                _check_shape(folder, f"state.{name}.{path[0]}", entry, value)

    def make_target() -> dict[str, Any]:
        target: dict[str, Any] = {}
        for name, own in stored.items():
            target |= {key: _room_for(entry, parameters[numbers[name]]) for key, entry in own.values()}
        return target

    _verify(listed, folder, make_target())

    def apply() -> None:
        target = make_target()
        _read(folder, target)
        state = {numbers[name]: _nest(target, own) for name, own in stored.items()}
        optimizers.load(optimizer, {"state": state, "param_groups": groups})

    return apply


def _groups(
    listed: Manifest,
    folder: Path,
    entries: dict[_Path, tuple[str, Any]],
    optimizer: Any,
    numbers: dict[str, int],
) -> list[dict[str, Any]]:
    """Return the stored groups as the optimizer takes them, parameters by number in its own order."""
    found = {path[1:]: item for path, item in entries.items() if path[0] == "param_groups"}
    target = {key: _room_for(entry, None) for key, entry in found.values()}
    _verify(listed, folder, target)
    _read(folder, target)
    stored: list[dict[str, Any]] = _nest(target, found) if found else [{} for _ in optimizer.param_groups]
    if len(stored) != len(optimizer.param_groups):
        raise CheckpointError(
            f"{folder} holds {len(stored)} groups of parameters, and the optimizer has {len(optimizer.param_groups)}"
        )
    made: list[dict[str, Any]] = []
    first = 0
    for own, group in zip(optimizer.param_groups, stored, strict=True):
        places = range(first, first + len(own["params"]))
        known = [name for name in map(plain_name, group.get("params", ())) if name in numbers]
        if moved := [name for name in known if numbers[name] not in places]:
            raise CheckpointError(
                f"{folder} has {_some(moved)} in group {len(made)}, the optimizer in another"
            )
        made.append({**group, "params": list(places)})
        first = places.stop
    return made


def _nest(values: Mapping[str, Any], entries: Mapping[_Path, tuple[str, Any]]) -> Any:
    """Return the dicts and lists that torch took apart into entries; a number is a place in a list."""
    if () in entries:
        return values[entries[()][0]]
    below: dict[str | int, dict[_Path, tuple[str, Any]]] = {}
    for path, item in entries.items():
        below.setdefault(path[0], {})[path[1:]] = item
    made = {key: _nest(values, inner) for key, inner in below.items()}
    return [made[key] for key in sorted(made)] if all(isinstance(key, int) for key in made) else made


def _room_for(entry: Any, parameter: torch.Tensor | None) -> Any:
    """Return memory for an entry: sharded as its parameter is where it has that one's shape."""
    if not hasattr(entry, "size"):
        return None  # any object
    dtype = entry.properties.dtype
    if parameter is not None and is_sharded(parameter) and entry.size == parameter.shape:
        return from_local(torch.empty_like(to_local(parameter), dtype=dtype), parameter)
    device = parameter.device if parameter is not None and entry.size == parameter.shape else "cpu"
    return torch.empty(entry.size, dtype=dtype, device=device)


def _verify(listed: Manifest, folder: Path, target: dict[str, Any]) -> None:
    """Check what this process will read into these tensors, before any of them changes."""
    if not listed.checksums:
        return
    from torch.distributed import checkpoint as dcp

    places: dict[str, list[tuple[str, int, int]]] = {}

    class Recorder(dcp.FileSystemReader):
        """Notes what it is asked to read."""

        def read_data(self, plan: Any, planner: Any) -> Any:
            for item in plan.items:
                place = self.storage_data[item.storage_index]
                found = (item.storage_index.fqn, place.offset, place.offset + place.length)
                places.setdefault(place.relative_path, []).append(found)
            nothing: Any = torch.futures.Future()
            nothing.set_result(None)
            return nothing

    _read(folder, target, Recorder(folder))
    for file, found in places.items():
        listed.verify(
            folder / file,
            [(start, stop - start) for _, start, stop in found],
            lambda first, last, found=found: [  # type: ignore[misc]
                name for name, start, stop in found if start < last and stop > first
            ],
        )


def _read(folder: Path, target: dict[str, Any], reader: Any = None) -> None:
    """Fill the tensors, each process those parts that it holds, and put objects in their places."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    reader = reader or dcp.FileSystemReader(folder)
    for is_last in (False, True):
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns that it loads in one process, which is intended
                dcp.load(target, storage_reader=reader, planner=planner, no_dist=True)
            return
        except dcp.CheckpointException as error:
            if is_last or not fp8.allow_weights(_failures(error)):
                raise CheckpointError(f"{folder} cannot be read: {_failures(error)}") from error


def _failures(error: Any) -> str:
    """Return what failed on which ranks, each text once."""
    whose: dict[str, list[str]] = {}
    for rank, (failure, _) in error.failures.items():
        text = str(failure)
        text = repr(failure) if "\n" in text else f"{type(failure).__name__}: {text}"
        whose.setdefault(text, []).append(f"rank {rank}")
    return "; ".join(f"{', '.join(ranks)}: {text}" for text, ranks in whose.items())


def _compare(folder: Path, wanted: set[str], stored: set[str], whose: str) -> None:
    if missing := sorted(wanted - stored):
        raise CheckpointError(f"{folder} has nothing for {_some(missing)}")
    if unknown := sorted(stored - wanted):
        raise CheckpointError(f"{folder} has what {whose} does not know: {_some(unknown)}")


def _check_shape(folder: Path, name: str, entry: Any, own: torch.Tensor) -> None:
    shape = list(getattr(entry, "size", ()))
    if not hasattr(entry, "size") or shape != list(own.shape):
        raise CheckpointError(f"{folder}: {name!r} has shape {shape}, here it is {list(own.shape)}")


def _some(found: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in found[:_SHOWN])
    return shown if len(found) <= _SHOWN else f"{shown} and {len(found) - _SHOWN} more"
