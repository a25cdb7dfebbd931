"""Samplers without a generator: every rank draws their order from the random numbers of rank 0."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..comm import ops
from ..comm.base import Comm


class Lead:
    """Random numbers that all ranks have alike, for the samplers of one epoch.

    A sampler without a generator draws from torch's global one, whose state each rank has for itself. Inside this
    context manager the global generator has the common state. It goes on where the context was left last, so samplers
    that draw a little for each batch draw alike too.

    Afterwards the rank has its own state back. If that was the common state, it advances with it: as in a process that
    is alone.

    Args:
        state: of the global generator, where the common numbers begin.
    """

    def __init__(self, state: torch.Tensor) -> None:
        self._state = state
        self._own: torch.Tensor | None = None

    def __enter__(self) -> None:
        own = torch.get_rng_state()
        self._own = None if torch.equal(own, self._state) else own
        if self._own is not None:
            torch.set_rng_state(self._state)

    def __exit__(self, *_: object) -> None:
        self._state = torch.get_rng_state()
        if self._own is not None:
            torch.set_rng_state(self._own)


def begin_without(make: Callable[[], Iterator[Any]]) -> Iterator[Any] | None:
    """Return an iterator over batches that needs no lead; None where the global generator decides the first batch.

    The generator is then as before. Samplers are alike on all ranks, so all find the same.

    Args:
        make: makes the iterator; called once.
    """
    state = torch.get_rng_state()
    batches = make()
    first = list(itertools.islice(batches, 1))
    if torch.equal(torch.get_rng_state(), state):
        return itertools.chain(first, batches)
    torch.set_rng_state(state)
    return None


def share_state(comm: Comm) -> torch.Tensor:
    """Return the state of rank 0's global generator; all ranks call this.

    Args:
        comm: the collectives.
    """
    state: torch.Tensor = ops.broadcast(comm, torch.get_rng_state().to(comm.device))
    return state.cpu()
