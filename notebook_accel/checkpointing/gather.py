"""What goes into the files of a checkpoint."""

from __future__ import annotations

from typing import Any

from ..comm.xla import to_cpu
from . import names, randomness, weights
from .read import Parts, is_stateful, loader_state
from .write import File


def model_files(states: list[dict[str, Any]], safe_serialization: bool) -> list[File]:
    """Return a file for each model's state; ValueError names an entry that safetensors cannot hold."""
    if not safe_serialization:
        for state in states:
            weights.check_values(state)
        return [
            File(name=names.numbered(names.MODEL, index), content=dict(state))
            for index, state in enumerate(states)
        ]
    files = []
    for index, state in enumerate(states):
        tensors, dropped = weights.without_ties(state)
        files.append(File(name=names.numbered(names.SAFE_MODEL, index), content=tensors, texts=dropped))
    return files


def optimizer_files(states: list[dict[str, Any]]) -> list[File]:
    """Return a file for each optimizer's state."""
    # what only a resume reads does not push other files out of the system's cache
    return [
        File(name=names.numbered(names.OPTIMIZER, index), content=to_cpu(state), cached=False)
        for index, state in enumerate(states)
    ]


def shared_files(parts: Parts) -> list[File]:
    """Return the files of everything but models and optimizers that all processes have alike."""
    files = []
    for index, item in enumerate(parts.schedulers):
        file = names.numbered(names.SCHEDULER, index)
        files.append(File(name=file, content=to_cpu(item.state_dict()), cached=False))
    for index, loader in enumerate(parts.loaders):
        files.append(File(name=names.numbered(names.SAMPLER, index), content=loader_state(loader)))
    if parts.scaler is not None:
        files.append(File(name=names.SCALER, content=parts.scaler.state_dict()))
    for index, item in enumerate(parts.custom):
        files.append(File(name=names.custom(index), content=to_cpu(item.state_dict()), opaque=True))
    return files


def own_files(parts: Parts, rank: int, step: int) -> list[File]:
    """Return the files that each process has of its own."""
    files = [File(name=names.random_states(rank), content=randomness.capture(step))]
    if any(map(is_stateful, parts.loaders)):
        states = [loader.state_dict() if is_stateful(loader) else None for loader in parts.loaders]
        files.append(File(name=names.loader_states(rank), content=states, opaque=True))
    return files
