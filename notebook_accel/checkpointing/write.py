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
from .checksums import Written
from .folder import Staging
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

    def write(self, where: Path) -> Written:
        """Write the file, durably, and return what the manifest says of it."""
        if self.texts is None:
            return pickled.write(where / self.name, self.content, cached=self.cached)
        return weights.write(where / self.name, self.content, self.texts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What this rank does for a checkpoint.

    Attributes:
        staging: the folders of this save.
        ranks: those that write to the same disk; the first one puts the checkpoint in its place there.
        files: those of this rank.
        folders: those that all ranks write together.
        rank: of this process.
        facts: what the manifest says besides files.
        replaces: False if there is to be no checkpoint of that name.
        keep: how many automatically named checkpoints stay; None for all.
    """

    staging: Staging
    ranks: Sequence[int]
    files: Sequence[File]
    folders: Sequence[CollectiveFolder] = ()
    rank: int
    facts: dict[str, Any]
    replaces: bool = True
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


def own_files(
    parts: Parts, rank: int, step: int, counts: dict[tuple[int, ...] | None, int], device: torch.device
) -> list[File]:
    """Return the files that each process has of its own.

    Args:
        parts: what is saved.
        rank: of this process.
        step: the accelerator's count of batches.
        counts: those of each set of models, by the places of these in `parts`; None for a set that is new.
        device: of this process, whose random state is saved too.
    """
    content = {**randomness.capture(step, device), "counts": counts}
    files = [File(name=names.random_states(rank), content=content)]
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
    staging: Staging, topology: Topology, barrier: ErrorBarrier, *, in_background: bool
) -> Sequence[int]:
    """Make the folder to write in: one for all nodes that see it, one on the disk of each other node.

    Args:
        staging: the folders of this save.
        topology: the place of this rank.
        barrier: of all ranks, which all call this.
        in_background: threads will write, which meet in files: all ranks have to see one folder.

    Returns:
        The ranks that write to the same folder as this one.

    Raises:
        CheckpointError: on all ranks where one cannot make it, or does not see it.
    """
    target = staging.target
    what = f"checkpoint {target} cannot be written"
    error = _attempt(lambda: folder.prepare(staging)) if topology.rank == 0 else None
    barrier.require_success("start", error, what)
    if topology.world_size == 1:
        return [0]
    sees = folder.is_prepared(staging, topology.rank)
    nodes = barrier.exchange("seen", None if sees else str(topology.node_rank))
    blind = [str(rank) for rank, node in enumerate(nodes) if node is not None]
    if in_background and blind:
        if topology.rank == 0:
            remove(staging)
        raise CheckpointError(
            f"{what} in the background: rank {', '.join(blind)} does not see the folder "
            f"{staging.path} of rank 0. Choose a folder on a disk that all processes share, or "
            "async_save=False"
        )
    is_first = topology.local_rank == 0 and not sees
    error = _attempt(lambda: folder.prepare(staging)) if is_first else None
    barrier.require_success("start-nodes", error, what)
    if blind:
        _require_one_folder(staging, topology, barrier, what)
    return [rank for rank, node in enumerate(nodes) if node == nodes[topology.rank]]


def _require_one_folder(staging: Staging, topology: Topology, barrier: ErrorBarrier, what: str) -> None:
    """Raise CheckpointError on all ranks where one has another folder than the first rank of its node."""
    error = None if staging.path.is_dir() else f"it saves to {staging.target}, other ranks of its node do not"
    if any(text is not None for text in barrier.exchange("one-folder", error)) and topology.local_rank == 0:
        remove(staging)
    barrier.require_success("one-folder-each-node", error, f"{what}: the ranks of a node save to one folder")


def remove(staging: Staging) -> None:
    """Remove what there is of a save that failed; never raises."""
    _attempt(lambda: folder.remove_unfinished(staging.target, staging.token))


@contextlib.contextmanager
def remove_if_interrupted(staging: Staging, topology: Topology) -> Iterator[None]:
    """Leave nothing of a save that is interrupted in this block, or whose ranks lose each other.

    After a CheckpointError nothing is to be done: all ranks raise it, and have removed what there was.

    Args:
        staging: the folders of this save.
        topology: the place of this rank; the first one of a node removes the folder, while others may still write.
    """
    try:
        yield
    except CheckpointError:
        raise
    except BaseException:
        if topology.local_rank == 0:
            remove(staging)
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
    staging, is_first = plan.staging, plan.rank == plan.ranks[0]
    what = f"checkpoint {staging.target} was not written, what was there before is untouched"

    def seal() -> None:
        folder.seal(staging, plan.facts, plan.ranks)

    def put_in_place() -> None:
        folder.put_in_place(staging, replaces=plan.replaces, keep=plan.keep)

    for stage, step in (
        ("written", functools.partial(_write_all, plan)),
        ("sealed", seal if is_first else None),
        ("committed", put_in_place if is_first else None),
    ):
        error = None if step is None else _attempt(step)
        if any(text is not None for text in barrier.exchange(stage, error)):
            if is_first:
                remove(staging)  # where the disk is full, this makes room for the errors
            barrier.require_success(f"{stage}-failed", error, what)


def _write_all(plan: Plan) -> None:
    """Write files of safetensors beside those of torch.save, which a lock keeps one after the other."""
    found: dict[str, Written] = {}
    where = plan.staging.path
    for part in plan.folders:
        for path in part.write(where):
            found[path.relative_to(where).as_posix()] = manifest.describe(path)

    def put(file: File) -> None:
        found[file.name] = file.write(where)

    rawio.run_jobs([functools.partial(put, file) for file in plan.files], _LANES)
    manifest.note(where, plan.rank, found)


def _attempt(action: Callable[[], object]) -> str | None:
    """Return what went wrong as text, for all ranks to raise; None where nothing did."""
    try:
        action()
    except CheckpointError as error:
        return str(error)  # a sentence
    except Exception as error:  # of any kind: the other ranks learn of it, and all raise
        return f"{type(error).__name__}: {error}"
    return None
