"""Batches of indices that can be gone on with: where an epoch stands, and what decided its order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch.utils.data import BatchSampler, SequentialSampler

from .samplers import SeedableRandomSampler, SkipBatchSampler, batches_from, sampler_chain


class ResumableSampler(BatchSampler):
    """A batch sampler, or sampler, whose iterators have a state in the sense of torchdata.

    `order` is that of the next epoch, as `order_of` gives it; None leaves it to the samplers.
    """

    def __init__(self, sampler: Any, order: list[dict[str, Any]] | None = None) -> None:
        self.inner = sampler
        self.order = order

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> ResumableIterator:
        return ResumableIterator(self.inner, self.order)


class ResumableIterator:
    """An iterator over a batch sampler that notes what decided its order when it draws its first batch.

    Positions are counted from the start of the epoch, also where `skip_first_batches` left some out, so that a
    state fits loaders that skip and loaders that don't.
    """

    def __init__(self, sampler: Any, order: list[dict[str, Any]] | None = None) -> None:
        self._skipped = 0
        while type(sampler) is SkipBatchSampler:
            self._skipped += sampler.skip_batches
            sampler = sampler.batch_sampler
        self._sampler = sampler
        self._position = self._skipped
        self._order = order
        self._batches: Iterator[Any] | None = None

    def __iter__(self) -> ResumableIterator:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            if self._order is not None:
                restore_order(self._sampler, self._order)
            self._order = order_of(self._sampler, with_global=True)
            self._batches = batches_from(self._sampler, self._skipped)
        batch = next(self._batches)
        self._position += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position and what decided the order; None where nothing was drawn yet."""
        return {"position": self._position, "order": None if self._batches is None else self._order}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at the position, in the order of the epoch that the state is of."""
        if state_dict["order"] is None:
            return
        self._position, self._order = state_dict["position"], state_dict["order"]
        here = torch.get_rng_state()
        restore_order(self._sampler, state_dict["order"])
        self._batches = batches_from(self._sampler, self._position)
        if any("global" in state for state in state_dict["order"]):
            # Samplers without a generator of their own draw when the first batch is asked for.
            first = next(self._batches, None)
            torch.set_rng_state(here)
            if first is not None:
                self._batches = chain([first], self._batches)


def order_of(sampler: Any, *, with_global: bool = False) -> list[dict[str, Any]]:
    """Return what decides the order of the sampler's next epoch, a dict for each sampler within it.

    `with_global` adds torch's global generator where no sampler of a shuffled epoch has one of its own.
    """
    states: list[dict[str, Any]] = []
    part: Any = None
    for part in sampler_chain(sampler):
        if type(part) is SkipBatchSampler:
            continue
        generator = getattr(part, "generator", None)
        if isinstance(part, SeedableRandomSampler):
            states.append({"epoch": part.epoch, "initial_seed": part.initial_seed})
        elif isinstance(generator, torch.Generator):
            states.append({"generator": generator.get_state()})
        else:
            states.append({})
    if with_global and not any(states) and not isinstance(part, SequentialSampler):
        states[-1] = {"global": torch.get_rng_state()}
    return states


def restore_order(sampler: Any, states: list[dict[str, Any]]) -> None:
    """Make the sampler's next epoch that of the states.

    Raises:
        ValueError: they are those of other samplers.
    """
    parts = [part for part in sampler_chain(sampler) if type(part) is not SkipBatchSampler]
    fits = len(parts) == len(states) and all(
        isinstance(part, SeedableRandomSampler) == ("epoch" in state)
        and ("generator" not in state or isinstance(getattr(part, "generator", None), torch.Generator))
        for part, state in zip(parts, states, strict=True)
    )
    if not fits:
        raise ValueError(
            f"the state is of a loader with {len(states)} samplers, {[sorted(state) for state in states]}, and does "
            f"not fit this one's, {[type(part).__name__ for part in parts]}: make and prepare the loader as before"
        )
    for part, state in zip(parts, states, strict=True):
        if "epoch" in state:
            part.epoch, part.initial_seed = state["epoch"], state["initial_seed"]
        elif "generator" in state:
            part.generator.set_state(state["generator"])
        elif "global" in state:
            torch.set_rng_state(state["global"])
