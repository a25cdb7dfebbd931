"""Writing a checkpoint: each rank its files, then all or nothing."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from ..topology import Topology
from . import folder, names, pickled, rawio, weights
from .agreement import Agreement

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

    def write(self, where: Path) -> None:
        """Write the file, durably."""
        if self.texts is None:
            pickled.write(where / self.name, self.content, cached=self.cached)
        else:
            weights.write(where / self.name, self.content, self.texts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What this rank does for a checkpoint.

    Attributes:
        target: the checkpoint's folder.
        files: those of this rank.
        together: writes into the checkpoint's folder what all ranks write together; each does so once.
        topology: the place of this rank.
        facts: what the manifest says besides the sizes of files.
        keep: how many automatically named checkpoints stay; None for all.
    """

    target: Path
    files: list[File]
    together: Callable[[Path], None] = lambda where: None
    topology: Topology
    facts: dict[str, Any]
    keep: int | None = None


def start(target: Path, topology: Topology, agree: Agreement) -> None:
    """Make the folder to write in; CheckpointError on all ranks where one cannot."""
    error = _attempt(lambda: folder.prepare(target)) if topology.is_main else None
    agree.require("start", error, f"checkpoint {target} cannot be written")
    where = folder.saving(target)
    if topology.is_local_main and not topology.is_main:  # a node that does not see rank 0's disk
        error = _attempt(lambda: None if where.exists() else folder.prepare(target))
    agree.require("start-nodes", error, f"checkpoint {target} cannot be written")


def finish(plan: Plan, agree: Agreement) -> None:
    """Write this rank's files and put the checkpoint in its place, together with the other ranks.

    CheckpointError on all ranks if one fails; then nothing is left of the new checkpoint.
    """
    try:
        _finish(plan, agree)
    finally:
        agree.leave()


def _finish(plan: Plan, agree: Agreement) -> None:
    where = folder.saving(plan.target)
    what = f"checkpoint {plan.target} was not written, what was there before is untouched"
    error = _attempt(lambda: plan.together(where))
    error = error or _attempt(lambda: _write_all(plan.files, where))
    failed = [text is not None for text in agree.exchange("written", error)]
    if any(failed):
        if plan.topology.is_local_main:
            _attempt(lambda: folder.remove(where))
        agree.require("failed", error, what)
    error = _attempt(lambda: _commit(plan)) if plan.topology.is_main else None
    agree.require("committed", error, what)
    if plan.topology.is_local_main and not plan.topology.is_main and where.exists():
        error = _attempt(lambda: _commit(plan))
    agree.require("committed-nodes", error, what)


def _write_all(files: list[File], where: Path) -> None:
    """Write files of safetensors beside those of torch.save, which a lock keeps one after the other."""
    rawio.work_off([functools.partial(file.write, where) for file in files], _LANES)


def _commit(plan: Plan) -> None:
    where = folder.saving(plan.target)
    sizes = {
        path.relative_to(where).as_posix(): path.stat().st_size
        for path in sorted(where.rglob("*"))
        if path.is_file() and names.is_ours(path.relative_to(where).parts[0])
    }
    text = json.dumps({"version": 1, **plan.facts, "files": sizes}, indent=1)
    (where / names.MANIFEST).write_text(text, encoding="utf-8")
    rawio.sync(where / names.MANIFEST)
    folder.commit(plan.target)
    if plan.keep is not None:
        for _, path in names.checkpoints(plan.target.parent)[: -plan.keep]:
            if path != plan.target:
                folder.remove(path)


def _attempt(action: Callable[[], object]) -> str | None:
    """Return what went wrong as text, for all ranks to raise; None where nothing did."""
    try:
        action()
    except Exception as error:  # whatever it is, the others are told and this rank raises with them
        return f"{type(error).__name__}: {error}"
    return None


def snapshot(files: list[File], copies: Copies) -> list[File]:
    """Return the files with contents that training does not change any more."""
    return [
        dataclasses.replace(
            file, content=copy.deepcopy(file.content) if file.opaque else copies.of(file.content)
        )
        for file in files
    ]


class Copies:
    """Copies of tensors on the CPU; tensors that share memory share it in the copy.

    The memory is kept, so that a second snapshot of the same sizes need not ask the system for it.
    """

    def __init__(self) -> None:
        self._spare: dict[int, list[torch.Tensor]] = {}
        self._used: list[torch.Tensor] = []

    def reset(self) -> None:
        """Let the next snapshot overwrite the copies made so far, and forget memory that the last did not use."""
        self._spare = {}
        for block in self._used:
            self._spare.setdefault(block.nbytes, []).append(block)
        self._used = []

    def of(self, tree: Any) -> Any:
        """Return a copy of nested dicts, lists and tuples of tensors."""
        shared: dict[tuple[torch.device, int], torch.Tensor] = {}

        def one(path: tuple[Any, ...], tensor: torch.Tensor) -> torch.Tensor:
            plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
            plain = plain and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
            if not plain or tensor.nbytes == 0:
                return tensor.detach().to("cpu", copy=True)
            storage = tensor.untyped_storage()
            key = (tensor.device, storage.data_ptr())
            if key not in shared:
                shared[key] = self._copy(storage)
            result = torch.empty(0, dtype=tensor.dtype, device="cpu")
            result.set_(shared[key].untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
            return result

        return pickled.replace_tensors(tree, one)

    def _copy(self, storage: torch.UntypedStorage) -> torch.Tensor:
        spare = self._spare.get(storage.nbytes())
        block = spare.pop() if spare else torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu")
        # between tensors, as torch copies these by several threads
        block.copy_(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
        self._used.append(block)
        return block
