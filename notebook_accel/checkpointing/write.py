"""Writing a checkpoint: what goes into which file, and how all ranks write their files, whole or not at all."""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from ..comm import xla
from ..comm.base import Comm
from ..data_loader import resume
from ..errors import CheckpointError
from ..topology import Topology
from . import folder, manifest, names, pickled, randomness, rawio, weights
from .parts import CollectiveFolder, Parts

_LANES: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """A file of a checkpoint and what goes into it.

    Attributes:
        name: of the file.
        content: tensors by name for a safetensors file, any object for others.
        texts: None for files of torch.save; for safetensors, the texts of its header.
        opaque: the content is a user's object that only `copy.deepcopy` knows how to copy.
        cached: whether the file stays in the system's cache, for files that may be read soon.
    """

    name: str
    content: Any
    texts: dict[str, str] | None = None
    opaque: bool = False
    cached: bool = True

    def write(self, where: Path) -> str:
        """Write the file, durably, and return its checksums for the manifest."""
        if self.texts is None:
            return pickled.write(where / self.name, self.content, cached=self.cached)
        return weights.write(where / self.name, self.content, self.texts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What this rank does for a checkpoint.

    Attributes:
        target: the checkpoint's folder.
        files: those of this rank.
        folders: those that all ranks write together.
        topology: the place of this rank.
        facts: what the manifest says besides the sizes of files.
        keep: how many automatically named checkpoints stay; None for all.
    """

    target: Path
    files: Sequence[File]
    folders: Sequence[CollectiveFolder] = ()
    topology: Topology
    facts: dict[str, Any]
    keep: int | None = None


class ErrorBarrier(ABC):
    """Barriers at which all ranks wait for each other and learn each other's errors."""

    @abstractmethod
    def exchange(self, stage: str, error: str | None) -> list[str | None]:
        """Return every rank's error, or None, in rank order, once all ranks have come to this stage.

        Args:
            stage: the name of the barrier.
            error: what went wrong in this rank, None for nothing.
        """

    def require_success(self, stage: str, error: str | None, what: str) -> None:
        """Raise CheckpointError on all ranks if one of them has an error. A text that all have is told without ranks.

        Args:
            stage: the name of the barrier.
            error: what went wrong in this rank, None for nothing.
            what: the start of the message.
        """
        errors = self.exchange(stage, error)
        whose: dict[str, list[str]] = {}
        for rank, text in enumerate(errors):
            if text is not None:
                whose.setdefault(text, []).append(f"rank {rank}")
        found = [
            text if 1 < len(ranks) == len(errors) else f"{', '.join(ranks)}: {text}"
            for text, ranks in whose.items()
        ]
        if found:
            raise CheckpointError(f"{what}: {'; '.join(found)}")

    def close(self) -> None:
        """Give back what the barriers needed; this rank comes to no other."""
        return None


class CollectiveErrorBarrier(ErrorBarrier):
    """For the main thread: each barrier is a collective."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def exchange(self, stage: str, error: str | None) -> list[str | None]:
        return self._comm.all_gather_object(error)


def model_files(states: Sequence[dict[str, Any]], safe_serialization: bool) -> list[File]:
    """Return a file for each model's state.

    Args:
        states: tensors by name, for each model.
        safe_serialization: safetensors, not files of torch.save.

    Raises:
        ValueError: an entry has no values, or safetensors cannot hold it.
    """
    if not safe_serialization:
        for state in states:
            weights.check_values(state)
        return [
            File(name=names.with_index(names.MODEL, index), content=dict(state))
            for index, state in enumerate(states)
        ]
    files = []
    for index, state in enumerate(states):
        tensors, dropped = weights.without_ties(state)
        files.append(File(name=names.with_index(names.SAFE_MODEL, index), content=tensors, texts=dropped))
    return files


def shared_files(
    parts: Parts, optimizer_states: Sequence[dict[str, Any]], device: torch.device
) -> list[File]:
    """Return the files, but those of models, that are the same for all processes.

    Args:
        parts: what is saved.
        optimizer_states: of the optimizers that have files; none where all ranks write these together.
        device: of this process; tensors on XLA devices are copied to the CPU.
    """
    # only a resume reads these files: they need no place in the system's cache
    files = [
        File(name=names.with_index(names.OPTIMIZER, index), content=_on_cpu(state, device), cached=False)
        for index, state in enumerate(optimizer_states)
    ]
    for index, scheduler in enumerate(parts.schedulers):
        content = _on_cpu(scheduler.state_dict(), device)
        files.append(File(name=names.with_index(names.SCHEDULER, index), content=content, cached=False))
    for index, loader in enumerate(parts.loaders):
        files.append(File(name=names.with_index(names.SAMPLER, index), content=resume.position_of(loader)))
    if parts.scaler is not None:
        files.append(File(name=names.SCALER, content=parts.scaler.state_dict()))
    for index, item in enumerate(parts.custom):
        content = _on_cpu(item.state_dict(), device)
        files.append(File(name=names.custom(index), content=content, opaque=True))
    return files


def own_files(parts: Parts, rank: int, step: int, device: torch.device) -> list[File]:
    """Return the files that each process has of its own.

    Args:
        parts: what is saved.
        rank: of this process.
        step: the accelerator's count of batches.
        device: of this process, whose random state is saved too.
    """
    files = [File(name=names.random_states(rank), content=randomness.capture(step, device))]
    are_stateful = [resume.is_stateful(loader) for loader in parts.loaders]
    if any(are_stateful):
        states = [
            loader.state_dict() if is_stateful else None
            for loader, is_stateful in zip(parts.loaders, are_stateful, strict=True)
        ]
        files.append(File(name=names.loader_states(rank), content=states, opaque=True))
    return files


def _on_cpu(content: Any, device: torch.device) -> Any:
    return xla.to_cpu(content) if device.type == "xla" else content


def start(
    target: Path, topology: Topology, barrier: ErrorBarrier, token: str, *, in_background: bool
) -> None:
    """Make the folder to write in: one for all nodes that see it, one on the disk of each other node.

    Args:
        target: the checkpoint's folder.
        topology: the place of this rank.
        barrier: of all ranks, which all call this.
        token: of this save alone; the same on all ranks.
        in_background: threads will write, which meet in files: all ranks have to see one folder.

    Raises:
        CheckpointError: on all ranks where one cannot make it, or does not see it.
    """
    what = f"checkpoint {target} cannot be written"
    is_alone = topology.world_size == 1
    mark = None if is_alone else token
    error = _attempt(lambda: folder.prepare(target, mark)) if topology.rank == 0 else None
    barrier.require_success("start", error, what)
    if is_alone:
        return
    sees = folder.is_prepared(target, token)
    found = barrier.exchange("seen", None if sees else "")
    blind = [str(rank) for rank, text in enumerate(found) if text is not None]
    if in_background and blind:
        if topology.rank == 0:
            _attempt(lambda: folder.remove(folder.staging(target)))
        raise CheckpointError(
            f"{what} in the background: rank {', '.join(blind)} does not see the folder "
            f"{folder.staging(target)} of rank 0. Choose a folder on a disk that all processes share, or "
            "async_save=False"
        )
    is_first = topology.local_rank == 0 and not sees
    error = _attempt(lambda: folder.prepare(target, token)) if is_first else None
    barrier.require_success("start-nodes", error, what)
    if blind:
        _require_one_folder(target, topology, barrier, what)
    if topology.local_rank == 0:
        folder.unmark(target, token)


def _require_one_folder(target: Path, topology: Topology, barrier: ErrorBarrier, what: str) -> None:
    """Raise CheckpointError on all ranks where one has another folder than the first rank of its node."""
    error = (
        None if folder.staging(target).is_dir() else f"it saves to {target}, other ranks of its node do not"
    )
    if any(text is not None for text in barrier.exchange("one-folder", error)) and topology.local_rank == 0:
        _attempt(lambda: folder.remove(folder.staging(target)))
    barrier.require_success("one-folder-each-node", error, f"{what}: the ranks of a node save to one folder")


@contextlib.contextmanager
def remove_if_interrupted(target: Path, topology: Topology) -> Iterator[None]:
    """Leave nothing of a save that is interrupted in this block, or whose ranks lose each other.

    After a CheckpointError nothing is to be done: all ranks raise it, and have removed what there was.

    Args:
        target: the checkpoint's folder.
        topology: the place of this rank; the first one of a node removes the folder, while others may still write.
    """
    try:
        yield
    except CheckpointError:
        raise
    except BaseException:
        if topology.local_rank == 0:
            _attempt(lambda: folder.remove_unfinished(target))
        raise


def finish(plan: Plan, barrier: ErrorBarrier) -> None:
    """Write this rank's files and put the checkpoint in its place, together with the other ranks.

    Args:
        plan: of this rank.
        barrier: of all ranks; it is closed afterwards.

    Raises:
        CheckpointError: on all ranks if one fails; then nothing is left of the new checkpoint.
    """
    try:
        _finish(plan, barrier)
    finally:
        barrier.close()


def _finish(plan: Plan, barrier: ErrorBarrier) -> None:
    where = folder.staging(plan.target)
    what = f"checkpoint {plan.target} was not written, what was there before is untouched"
    error = _attempt(lambda: _write_all(plan, where))
    failed = [text is not None for text in barrier.exchange("written", error)]
    if any(failed):
        if plan.topology.local_rank == 0:
            _attempt(lambda: folder.remove(where))
        barrier.require_success("failed", error, what)
    commit = functools.partial(folder.commit, plan.target, plan.facts, plan.keep)
    error = _attempt(commit) if plan.topology.rank == 0 else None
    barrier.require_success("committed", error, what)
    if plan.topology.local_rank == 0 and plan.topology.rank != 0 and where.exists():
        error = _attempt(commit)
    barrier.require_success("committed-nodes", error, what)


def _write_all(plan: Plan, where: Path) -> None:
    """Write files of safetensors beside those of torch.save, which a lock keeps one after the other."""
    found: dict[str, str] = {}
    for part in plan.folders:
        for path in part.write(where):
            found[path.relative_to(where).as_posix()] = manifest.describe(path)

    def put(file: File) -> None:
        found[file.name] = file.write(where)

    rawio.run_jobs([functools.partial(put, file) for file in plan.files], _LANES)
    manifest.note(where, plan.topology.rank, found)


def _attempt(action: Callable[[], object]) -> str | None:
    """Return what went wrong as text, for all ranks to raise; None where nothing did."""
    try:
        action()
    except CheckpointError as error:
        return str(error)  # a sentence
    except Exception as error:  # of any kind: the other ranks learn of it, and all raise
        return f"{type(error).__name__}: {error}"
    return None
