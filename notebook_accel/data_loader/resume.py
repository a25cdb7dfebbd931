"""Batches of indices that can be gone on with: where an epoch stands, and what decided its order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.utils.data import BatchSampler, SequentialSampler

from .samplers import SeedableRandomSampler, SkipBatchSampler, batches_from, sampler_chain

_END: Final = object()

Order = list[dict[str, Any]]
"""What decides the order of an epoch, a dict for each sampler; see `order_of`."""


class Course:
    """What decided, or is to decide, the order of a loader's epochs.

    Attributes:
        order: of the epoch that is being read; None before its first batch and after its last.
        next_order: of the epoch that starts next; None leaves it to the samplers.
        ended: the epoch's last batch was read, though nobody asked for one more.
        interrupted: of the epoch in which a checkpoint was saved, for `skip_first_batches` to go on with.
        num_drawn: batches that were drawn of this epoch, once these are all; None before.
        interrupted_epoch: which one it is.
        goes_on: this epoch was begun by another process, so that its start draws no random numbers here.
        parent: the course of the loader that `skip_first_batches` was given, which is in the same epoch.
    """

    def __init__(self, parent: Course | None = None) -> None:
        self.order: Order | None = None
        self.next_order: Order | None = None
        self.ended = False
        self.interrupted: Order | None = None
        self.num_drawn: int | None = None
        self.interrupted_epoch = 0
        self.goes_on = False
        self.parent = parent

    def begin(self) -> None:
        """Note that an epoch starts."""
        self.goes_on = self.next_order is not None
        self.num_drawn = None
        self._set(None)

    def draw(self, order: Order) -> None:
        """Note what decided the order when the first batch was drawn."""
        self.next_order = None
        self._set(order)

    def end(self) -> None:
        """Note that the epoch's last batch was read."""
        self._set(None)

    def reach_end(self) -> None:
        """Note that the batch at hand is the epoch's last one."""
        for course in self._with_parents():
            course.ended = True

    def after(self, epoch: int, num_batches: int) -> tuple[Course, int]:
        """Return the course of a loader that skips batches in this one's epoch, and the epoch that it starts with.

        That is the interrupted one, if this is its number. Where the checkpoint was saved with its last batch,
        the number is that of the next one, and whoever skips batches means those of the interrupted one.
        """
        made = Course(self)
        if self.next_order is not None:
            made.next_order = self.next_order
        elif self.interrupted is not None:
            if self.ended and num_batches > 0 and epoch == self.interrupted_epoch + 1:
                epoch = self.interrupted_epoch
            if epoch == self.interrupted_epoch:
                made.next_order = self.interrupted
        return made, epoch

    def state_dict(self, epoch: int) -> dict[str, Any]:
        """Return where the loader stands in this epoch."""
        state: dict[str, Any] = {"iteration": epoch}
        if self.order is not None:
            state |= {"iteration": epoch + self.ended, "order": self.order, "order_of": epoch}
        elif self.interrupted is not None:
            state |= {"order": self.interrupted, "order_of": self.interrupted_epoch}
        return state if "order" not in state else state | {"ended": self.ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Know the epoch that `state_dict` was called in as the interrupted one."""
        self.interrupted = state.get("order")
        self.interrupted_epoch = state.get("order_of", state["iteration"])
        self.ended = state.get("ended", False)

    def _set(self, order: Order | None) -> None:
        for course in self._with_parents():
            course.order, course.interrupted, course.ended = order, None, False

    def _with_parents(self) -> Iterator[Course]:
        course: Course | None = self
        while course is not None:
            yield course
            course = course.parent


class ResumableSampler(BatchSampler):
    """A batch sampler, or sampler, whose iterators have a state in the sense of torchdata."""

    def __init__(self, sampler: Any, course: Course) -> None:
        self.inner = sampler
        self.course = course

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> ResumableIterator:
        return ResumableIterator(self.inner, self.course)


class ResumableIterator:
    """An iterator over a batch sampler that notes what decided its order when it draws its first batch.

    It draws one batch ahead, so that the last one is known while it is read, and nothing need be read ahead for that.

    Positions are counted from the start of the epoch, also where `skip_first_batches` left some out, so that a
    state fits loaders that skip and loaders that don't.
    """

    def __init__(self, sampler: Any, course: Course) -> None:
        self._skipped = 0
        while type(sampler) is SkipBatchSampler:
            self._skipped += sampler.skip_batches
            sampler = sampler.batch_sampler
        self._sampler = sampler
        self._position = self._skipped
        self._course = course
        self._order: Order | None = None
        self._batches: Iterator[Any] | None = None
        self._following: Any = _END
        self._num_drawn = 0

    def __iter__(self) -> ResumableIterator:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._draw(self._course.next_order)
        batch = self._following
        if batch is _END:
            raise StopIteration
        self._look_ahead()
        self._position += 1
        return batch

    def _look_ahead(self) -> None:
        assert self._batches is not None
        self._following = next(self._batches, _END)
        if self._following is _END:
            self._course.num_drawn = self._num_drawn
        else:
            self._num_drawn += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the position and what decided the order; None where nothing was drawn yet."""
        return {"position": self._position, "order": None if self._batches is None else self._order}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at the position, in the order of the epoch that the state is of."""
        if state_dict["order"] is None:
            return
        self._position = state_dict["position"]
        self._draw(state_dict["order"])

    def _draw(self, order: Order | None) -> None:
        """Start with the batches from the position on, in this order where there is one."""
        here = None if order is None else torch.get_rng_state()
        if order is not None:
            restore_order(self._sampler, order)
        self._order = order_of(self._sampler, with_global=True)
        self._course.draw(self._order)
        self._batches = batches_from(self._sampler, self._position)
        self._look_ahead()
        if here is not None and any("global" in state for state in self._order):
            # samplers without a generator of their own draw when the first batch is asked for
            torch.set_rng_state(here)


def order_of(sampler: Any, *, with_global: bool = False) -> Order:
    """Return what decides the order of the sampler's next epoch, a dict for each sampler within it.

    `with_global` adds torch's global generator where no sampler of a shuffled epoch has one of its own.
    """
    states: Order = []
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


def restore_order(sampler: Any, states: Order) -> None:
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
