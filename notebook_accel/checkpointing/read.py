"""Reading a checkpoint: everything is checked before anything is changed."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from ..caller import warn
from ..data_loader import resume
from ..dtensors import is_sharded, shard_like
from ..errors import CheckpointError
from . import manifest, models, names, optimizers, pickled, randomness
from .folder import recover
from .manifest import Manifest
from .models import Apply
from .parts import Parts
from .pickled import Keep, Outline

_PATIENCE: Final = 10
# state of torch's optimizers that has its parameter's shape
_LIKE_PARAMETER: Final = frozenset(
    {
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "acc_delta",
        "exp_inf",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """A checked checkpoint: `run` loads it.

    Attributes:
        first: steps of users' code that can fail, each with its undoing.
        steps: what does not fail any more.
        step: of the accelerator, None where the checkpoint has none.
        counts: see `write.own_files`; empty in a checkpoint without them.
    """

    first: list[tuple[Apply, Apply]] = field(default_factory=list)
    steps: list[Apply] = field(default_factory=list)
    step: int | None = None
    counts: Mapping[tuple[int, ...] | None, int] = field(default_factory=dict)

    def run(self) -> None:
        """Load; where a user's object refuses its state, those before it get theirs back."""
        undo: list[Apply] = []
        try:
            for apply, restore in self.first:
                undo.append(restore)
                apply()
        except Exception:
            for restore in reversed(undo):
                restore()
            raise
        for apply in self.steps:
            apply()


def identify(folder: Path, tries: int) -> tuple[int, int, Manifest | None]:
    """Return what changes when a save replaces the checkpoint in a folder, or moves it away for a moment.

    Args:
        folder: of the checkpoint.
        tries: how often it was read already. At last only its replacement counts: when it was moved changes too where
            a user's hook writes to it.
    """
    recover(folder)
    try:
        found = os.stat(folder)
        return found.st_ino, found.st_ctime_ns if tries < _PATIENCE else 0, manifest.read(folder)
    except (CheckpointError, OSError):
        return 0, 0, None


def plan(
    folder: Path,
    parts: Parts,
    rank: int,
    spread: Mapping[str, int],
    device: torch.device,
    *,
    count_models: bool,
    options: dict[str, Any],
    model_options: dict[str, Any],
    load_folders: Callable[[Manifest, Parts], list[Apply] | None] = lambda manifest, parts: None,
) -> Loading:
    """Check a checkpoint against the objects it is to be loaded into.

    Args:
        folder: of the checkpoint.
        parts: the objects; models without wrappers.
        rank: of this process; a checkpoint of fewer processes has no random states for the last ones, which get
            those that `randomness.derive` makes of rank 0's.
        spread: what the manifest says of a run that is spread like this one; stateful loaders go on in an epoch only
            there.
        device: of this process.
        count_models: False if hooks load some models by themselves.
        options: arguments of `torch.load` for optimizers and schedulers.
        model_options: arguments of the models' `load_state_dict`.
        load_folders: checks the folders that all ranks wrote together, and returns what loads models and optimizers;
            None where these have files of their own.

    Raises:
        CheckpointError: names the file, and the key, that is missing, damaged or does not fit.
    """
    listed = manifest.read(folder)
    listed.check_files()
    collective = load_folders(listed, parts)
    _check_counts(folder, parts, count_models, collective is not None)
    steps: list[Apply] = collective or []
    for index, model in enumerate(parts.models if collective is None else ()):
        path = _model_file(folder, index)
        listed.verify(path, names_in=functools.partial(pickled.names_in, path))
        source = models.open_source(path)
        steps.append(models.plan(model, [source], **model_options))
    for index, optimizer in enumerate(parts.optimizers if collective is None else ()):
        path = folder / names.with_index(names.OPTIMIZER, index)
        listed.verify(path, names_in=functools.partial(pickled.names_in, path))
        steps.append(_plan_optimizer(optimizer, Outline(path, **options)))
    for index, scheduler in enumerate(parts.schedulers):
        path = folder / names.with_index(names.SCHEDULER, index)
        listed.verify(path)
        steps.append(_plan_simple(scheduler, path, pickled.read(path, **options)))
    if parts.scaler is not None:
        path = folder / names.SCALER
        listed.verify(path)
        steps.append(_plan_simple(parts.scaler, path, pickled.read(path)))
    for index, loader in enumerate(parts.loaders):
        path = folder / names.with_index(names.SAMPLER, index)
        if path.exists() and (folder / names.MANIFEST).exists():
            listed.verify(path)
            steps.append(_plan_loader(loader, path))
    states = _random_states(listed, rank, device)
    if states:
        steps.append(functools.partial(randomness.apply, states, device))
    first = _plan_custom(listed, parts.custom)
    if any(map(resume.is_stateful, parts.loaders)):
        first += _plan_stateful(listed, parts.loaders, rank, spread)
    return Loading(first=first, steps=steps, step=states.get("step"), counts=states.get("counts", {}))


def _check_counts(folder: Path, parts: Parts, count_models: bool, is_collective: bool) -> None:
    found = {
        "schedulers": (names.count(folder, names.SCHEDULER), len(parts.schedulers)),
        "objects registered for checkpointing": (
            sum((folder / path.name).match("custom_checkpoint_*.pkl") for path in folder.iterdir()),
            len(parts.custom),
        ),
    }
    if not is_collective:
        found = {"optimizers": (names.count(folder, names.OPTIMIZER), len(parts.optimizers)), **found}
    if not is_collective and any(folder.glob(names.DEEPSPEED)):
        raise CheckpointError(
            f"{folder} was written by DeepSpeed, which alone can read it, and trains no model of this accelerator: "
            "give the Accelerator a DeepSpeedPlugin, and prepare the models"
        )
    if count_models and not is_collective:
        stored = max(names.count(folder, names.SAFE_MODEL), names.count(folder, names.MODEL))
        found = {"models": (stored, len(parts.models)), **found}
    for what, (stored, prepared) in found.items():
        if stored != prepared:
            missing = ""
            if stored < prepared:
                first = {
                    "models": names.SAFE_MODEL,
                    "optimizers": names.OPTIMIZER,
                    "schedulers": names.SCHEDULER,
                }.get(what)
                name = names.custom(stored) if first is None else names.with_index(first, stored)
                missing = f": it has no {name}"
            raise CheckpointError(
                f"{folder} holds {stored} {what}, and this accelerator has {prepared}{missing}"
            )


def _model_file(folder: Path, index: int) -> Path:
    safe, plain = (folder / names.with_index(name, index) for name in (names.SAFE_MODEL, names.MODEL))
    if not safe.exists() and not plain.exists():
        raise CheckpointError(f"{folder} has neither {safe.name} nor {plain.name}")
    return safe if safe.exists() else plain


def _plan_optimizer(optimizer: Any, outline: Outline) -> Apply:
    content, path = outline.content, outline.path
    for key in ("state", "param_groups"):
        if not isinstance(content, dict) or key not in content:
            raise CheckpointError(f"{path} has no key {key!r}: it holds no optimizer's state")
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    stored = [len(group["params"]) for group in content["param_groups"]]
    if sizes != stored:
        raise CheckpointError(
            f"{path}: param_groups hold {stored} parameters, those of the optimizer {sizes}"
        )
    numbers = [number for group in content["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    by_number = dict(zip(numbers, parameters, strict=True))
    # in optimizers of others, exp_avg may have any shape or be missing
    known = type(optimizer).__module__.startswith("torch.optim.")
    states = [(number, values) for number, values in content["state"].items() if isinstance(values, dict)]
    optimizers.check_kind(path, optimizer, content["param_groups"], states)
    for number, values in content["state"].items():
        if known and number in by_number:
            _check_state(path, number, values, by_number[number], optimizer.state.get(by_number[number], {}))

    def choose(where: tuple[Any, ...], tensor: torch.Tensor) -> torch.Tensor | Keep | None:
        if len(where) != 3 or where[0] != "state" or where[1] not in by_number:
            return None
        like = by_number[where[1]]
        if is_sharded(like):
            return functools.partial(shard_like, like=like) if tensor.shape == like.shape else None
        own = optimizer.state.get(by_number[where[1]], {}).get(where[2])
        if type(own) is not torch.Tensor or own.device.type != "cpu" or not own.is_contiguous():
            return None
        return own if own.shape == tensor.shape and own.dtype == tensor.dtype else None

    return lambda: optimizers.load(optimizer, outline.fill(choose))


def _check_state(path: Path, number: Any, values: Any, parameter: torch.Tensor, own: Any) -> None:
    if not isinstance(values, dict):
        return
    for key, value in own.items():
        if isinstance(value, torch.Tensor) and key not in values:
            raise CheckpointError(f"{path}: the state of parameter {number} has no key {key!r}")
    for key, value in values.items():
        if not isinstance(value, torch.Tensor):
            continue
        expected = own[key].shape if isinstance(own.get(key), torch.Tensor) else None
        if expected is None and key in _LIKE_PARAMETER:
            expected = parameter.shape
        if expected is not None and value.shape != expected:
            raise CheckpointError(
                f"{path}: {key!r} of parameter {number} has shape {list(value.shape)}, the optimizer's {list(expected)}"
            )


def _plan_simple(owner: Any, path: Path, content: Any) -> Apply:
    """Check the state of a scheduler or scaler by the keys it has now."""
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, no state")
    for key in owner.state_dict():
        if not key.startswith("_") and key not in content:
            raise CheckpointError(f"{path} has no key {key!r}")
    return lambda: owner.load_state_dict(content)


def _plan_stateful(
    listed: Manifest, loaders: Sequence[Any], rank: int, spread: Mapping[str, int]
) -> list[tuple[Apply, Apply]]:
    folder, path = listed.folder, listed.folder / names.loader_states(rank)
    was = {name: listed.facts.get(name, own) for name, own in spread.items()}
    if was != spread or not path.exists():
        reason = "was saved without their states"
        if was != spread:
            reason = f"was saved by {_describe_spread(was)}, not by {_describe_spread(spread)}"
        warn(f"stateful loaders start a new epoch: {folder} {reason}")
        return []
    listed.verify(path)
    states = pickled.read(path, weights_only=False)
    if not isinstance(states, list) or len(states) != len(loaders):
        raise CheckpointError(f"{path} does not hold the states of {len(loaders)} loaders")
    return [
        _with_undoing(loader, state)
        for loader, state in zip(loaders, states, strict=True)
        if resume.is_stateful(loader) and state is not None
    ]


def _describe_spread(spread: Mapping[str, int]) -> str:
    processes, shares = spread["world_size"], spread["data_shares"]
    return f"{processes} processes" + ("" if shares == processes else f" with {shares} shares of the data")


def _plan_loader(loader: Any, path: Path) -> Apply:
    state = pickled.read(path)
    if not isinstance(state, dict) or "iteration" not in state:
        raise CheckpointError(f"{path} has no key 'iteration'")

    return lambda: resume.go_to_position(loader, state)


def _random_states(listed: Manifest, rank: int, device: torch.device) -> dict[str, Any]:
    """Return the random states for a rank; empty where a checkpoint of others has none."""
    path = listed.folder / names.random_states(rank)
    derived = not path.exists()
    if derived:
        path = listed.folder / names.random_states(0)
    if not path.exists():  # what our own manifest lists has been checked
        warn(f"random states stay as they are: {listed.folder} has no {path.name}")
        return {}
    listed.verify(path)
    states = pickled.read(path)
    randomness.check(path, states)
    return randomness.derive(states, rank, device) if derived else dict(states)


def _plan_custom(listed: Manifest, objects: Sequence[Any]) -> list[tuple[Apply, Apply]]:
    paths = [listed.folder / names.custom(index) for index in range(len(objects))]
    for path in paths:  # before the first one is unpickled, which runs its code
        listed.verify(path)
    return [
        _with_undoing(owner, pickled.read(path, weights_only=False))
        for owner, path in zip(objects, paths, strict=True)
    ]


def _with_undoing(owner: Any, content: Any) -> tuple[Apply, Apply]:
    before = copy.deepcopy(owner.state_dict())
    return lambda: owner.load_state_dict(content), lambda: owner.load_state_dict(before)
