"""The way of batches from rank 0 to the ranks: each gets its part of the tensors, and their structure if it is new."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from .. import nested
from ..comm.base import Comm

_ALIGNMENT: Final = 16
_NO_COUNT: Final = -1
_PACKED, _NEW_PACKED, _PICKLED = range(3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """A global batch of rank 0, or the part of it that a rank received.

    Attributes:
        batch: completed to a multiple of the number of parts.
        num_samples: samples in the global batch before it was completed; None where one process gets it as it is,
            uncounted.
        is_last: nothing follows.
        share: samples of each part, if the tensors of the batch are shared out by their first dimension.
        is_part: the batch is the rank's part already.
    """

    batch: Any
    num_samples: int | None
    is_last: bool
    share: int | None = None
    is_part: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Slot:
    """Where a tensor is in the bytes of a part.

    Attributes:
        start: its first byte.
        shape: of the tensor in a part.
        dtype: of the tensor.
    """

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def stop(self) -> int:
        """The byte after the last one."""
        return self.start + torch.Size(self.shape).numel() * self.dtype.itemsize

    def view(self, part: torch.Tensor) -> torch.Tensor:
        """Return the tensor in a part, which is a tensor of bytes."""
        return part[self.start : self.stop].view(self.dtype).view(self.shape)


class _Hole:
    """Stands for a tensor in the structure of a batch: the class itself does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Structure:
    """What is known of a part without its numbers.

    Attributes:
        tree: the batch with `_Hole` in place of each tensor.
        slots: where these tensors are, depth first.
        size: bytes of a part.
    """

    tree: Any
    slots: list[_Slot]
    size: int


class Exchange:
    """Hands the rounds of one iteration out from rank 0 to all ranks. All of them call it for each round.

    A round begins with a message of four numbers. If the structure of the batch is another one than before, or if the
    batch cannot be shared out by the first dimension of its tensors, pickled bytes follow. Tensors come last: each
    rank receives its own part only.

    Args:
        comm: the collectives.
        parts: the part that each rank gets, by rank.
    """

    def __init__(self, comm: Comm, parts: Sequence[int]) -> None:
        self._comm = comm
        self._parts = parts
        self._num_parts = max(parts) + 1
        self._pickled = b""
        self._structure: _Structure | None = None
        self._own = torch.empty(0)
        self._outgoing = torch.empty(0)

    def __call__(self, sent: Round | str | None) -> Round | str | None:
        """Return what rank 0 sends.

        Args:
            sent: of rank 0: a round, why there is none, or None for the end.

        Returns:
            The round: of rank 0 as it was sent; of other ranks with their parts where `is_part` is True.
        """
        if not self._comm.scatters:
            received: Round | str | None = self._comm.broadcast_object(sent, 0)
            return received
        if self._comm.rank == 0:
            self._send(sent)
            return sent
        return self._receive()

    def _send(self, sent: Round | str | None) -> None:
        tensors = _tensors_to_share(sent, self._num_parts)
        if tensors is None or not isinstance(sent, Round):
            self._announce(_PICKLED, pickled=self._pickle(sent))
            return
        structure = _structure_of(sent.batch, tensors, sent.share)
        pickled = self._pickle(structure)
        is_new = pickled != self._pickled
        self._announce(_NEW_PACKED if is_new else _PACKED, sent, pickled if is_new else b"")
        if is_new:
            self._pickled = pickled
            self._set_structure(structure)
            self._outgoing = self._new_bytes(self._num_parts, structure.size)
        if structure.size == 0:
            return
        parts = self._outgoing.unbind()
        for number in set(self._parts[1:]):
            start = number * (sent.share or 0)
            for slot, tensor in zip(structure.slots, tensors, strict=True):
                mine = tensor if sent.share is None else tensor[start : start + sent.share]
                slot.view(parts[number]).copy_(mine)
        self._comm.scatter(self._own, [parts[number] for number in self._parts], 0)

    def _pickle(self, content: Any) -> bytes:
        try:
            return pickle.dumps(content)
        except Exception as error:  # the others wait for this round
            self._announce(_PICKLED, pickled=pickle.dumps(f"{type(error).__name__}: {error}"))
            raise

    def _announce(self, kind: int, sent: Round | None = None, pickled: bytes = b"") -> None:
        samples, is_last = (None, False) if sent is None else (sent.num_samples, sent.is_last)
        numbers = [kind, _NO_COUNT if samples is None else samples, is_last, len(pickled)]
        self._comm.broadcast(torch.tensor(numbers, dtype=torch.int64, device=self._comm.device), 0)
        if pickled:
            content = torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
            self._comm.broadcast(content.to(self._comm.device), 0)

    def _receive(self) -> Round | str | None:
        header = torch.empty(4, dtype=torch.int64, device=self._comm.device)
        kind, samples, is_last, length = self._comm.broadcast(header, 0).tolist()
        if length:
            content = pickle.loads(self._comm.broadcast(self._new_bytes(length), 0).cpu().numpy().tobytes())
            if kind == _PICKLED:
                received: Round | str | None = content
                return received
            self._set_structure(content)
        assert self._structure is not None
        if self._structure.size > 0:
            self._comm.scatter(self._own, None, 0)
        # copies: a tensor that is kept does not keep the others, and the buffer serves the next batch
        tensors = iter([slot.view(self._own).clone() for slot in self._structure.slots])
        batch = nested.recursively_apply(lambda _: next(tensors), self._structure.tree, test_type=_is_hole)
        count = None if samples == _NO_COUNT else samples
        return Round(batch=batch, num_samples=count, is_last=bool(is_last), is_part=True)

    def _set_structure(self, structure: _Structure) -> None:
        self._structure = structure
        self._own = self._new_bytes(structure.size)

    def _new_bytes(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=self._comm.device)


def _tensors_to_share(sent: Round | str | None, num_parts: int) -> list[torch.Tensor] | None:
    """Return the tensors of a batch, None where they cannot be packed in equal parts."""
    if not isinstance(sent, Round) or (sent.share is None and num_parts > 1):
        return None
    leaves = nested.leaves_of(sent.batch)
    if any(hasattr(leaf, "to") and not isinstance(leaf, torch.Tensor) for leaf in leaves):
        return None
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return (
        tensors if tensors and all(_is_plain(tensor, sent.share, num_parts) for tensor in tensors) else None
    )


def _is_plain(tensor: torch.Tensor, share: int | None, num_parts: int) -> bool:
    is_strided = type(tensor) is torch.Tensor and tensor.layout == torch.strided and not tensor.is_nested
    if not is_strided or tensor.is_quantized or tensor.requires_grad or tensor.is_meta:
        return False
    return share is None or (tensor.ndim > 0 and len(tensor) >= num_parts * share)


def _structure_of(batch: Any, tensors: list[torch.Tensor], share: int | None) -> _Structure:
    slots: list[_Slot] = []
    size = 0
    for tensor in tensors:
        shape = tuple(tensor.shape) if share is None else (share, *tensor.shape[1:])
        slots.append(_Slot(start=size, shape=shape, dtype=tensor.dtype))
        size = -(-slots[-1].stop // _ALIGNMENT) * _ALIGNMENT
    return _Structure(tree=nested.recursively_apply(lambda _: _Hole, batch), slots=slots, size=size)


def _is_hole(value: object) -> bool:
    return value is _Hole
