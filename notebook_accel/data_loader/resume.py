"""Where an epoch stands and what decided its order, so that another process can go on in the middle of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from .samplers import SeedableRandomSampler, SkipBatchSampler, batches_from, sampler_chain

_END: Final = object()

Order = list[dict[str, Any]]
"""What decides the order of an epoch, a dict for each sampler; see `order_of`."""


class Count:
    """How many batches an iterator draws.

    Attributes:
        total: None until all are drawn.
    """

    def __init__(self) -> None:
        self.total: int | None = None


class EpochState:
    """What decides the order of a loader's epochs, and where the loader stands.

    Attributes:
        order: of the current epoch; None before its first batch and after its last.
        next_order: of the next epoch; None leaves it to the samplers.
        ended: the epoch's last batch was read; the iteration has not asked for another one.
        interrupted: the order of the epoch in which a checkpoint was saved; `skip_first_batches` goes on with it.
        count: of the batches that the latest iterator draws.
        interrupted_epoch: the number of that epoch.
        goes_on: another process began this epoch, so that its start draws no random numbers here.
        parent: the state of the loader that was given to `skip_first_batches`; it is in the same epoch.
    """

    def __init__(self, parent: EpochState | None = None) -> None:
        self.order: Order | None = None
        self.next_order: Order | None = None
        self.ended = False
        self.interrupted: Order | None = None
        self.count = Count()
        self.interrupted_epoch = 0
        self.goes_on = False
        self.parent = parent

    def begin(self) -> None:
        """Note that an epoch starts."""
        self.goes_on = self.next_order is not None
        self.count = Count()
        self._set(None)

    def draw(self, order: Order) -> None:
        """Note what decided the order when the first batch was drawn."""
        self.next_order = None
        self._set(order)

    def end(self) -> None:
        """Note that the epoch's last batch was read."""
        self._set(None)

    def reach_end(self) -> None:
        """Note that the current batch is the epoch's last one."""
        for state in self._with_parents():
            state.ended = True

    def after(self, epoch: int, num_batches: int) -> tuple[EpochState, int]:
        """Return the state of a loader that skips batches of this one's epoch, and the epoch that it starts with.

        If a checkpoint was saved in this epoch, the new loader has the order of that epoch. If the checkpoint was
        saved with the last batch, `epoch` is the next one already: skipped batches are those of the epoch before.

        Args:
            epoch: of the loader.
            num_batches: how many are skipped.
        """
        made = EpochState(self)
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
        """Restore what `state_dict` returned: the epoch it was called in is the interrupted one."""
        self.interrupted = state.get("order")
        self.interrupted_epoch = state.get("order_of", state["iteration"])
        self.ended = state.get("ended", False)

    def _set(self, order: Order | None) -> None:
        for state in self._with_parents():
            state.order, state.interrupted, state.ended = order, None, False

    def _with_parents(self) -> Iterator[EpochState]:
        state: EpochState | None = self
        while state is not None:
            yield state
            state = state.parent


class ResumableSampler(BatchSampler):
    """A batch sampler, or sampler, whose iterators have `state_dict` and `load_state_dict` for torchdata."""

    def __init__(self, sampler: Any, epoch_state: EpochState) -> None:
        self.inner = sampler
        self.epoch_state = epoch_state

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> ResumableIterator:
        return ResumableIterator(self.inner, self.epoch_state)


class ResumableIterator:
    """An iterator over a batch sampler that notes what decided its order when it draws its first batch.

    It draws the indices of one batch ahead: so the last batch is known without reading another one.

    Positions count from the start of the epoch, also where `skip_first_batches` left some batches out. So a state
    fits loaders that skip batches and loaders that do not.
    """

    def __init__(self, sampler: Any, epoch_state: EpochState) -> None:
        self._skipped = 0
        while type(sampler) is SkipBatchSampler:
            self._skipped += sampler.skip_batches
            sampler = sampler.batch_sampler
        self._sampler = sampler
        self._position = self._skipped
        self._epoch_state = epoch_state
        self._count = epoch_state.count
        self._order: Order | None = None
        self._batches: Iterator[Any] | None = None
        self._following: Any = _END
        self._num_drawn = 0

    def __iter__(self) -> ResumableIterator:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._draw(self._epoch_state.next_order)
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
            self._count.total = self._num_drawn
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
        self._epoch_state.draw(self._order)
        self._batches = batches_from(self._sampler, self._position)
        self._look_ahead()
        if here is not None and any("global" in state for state in self._order):
            # samplers without a generator draw from the global one at the first batch
            torch.set_rng_state(here)


def is_stateful(loader: Any) -> bool:
    """Return True for a loader that saves its position within an epoch."""
    return bool(getattr(loader, "use_stateful_dataloader", False))


def position_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return where a loader stands: its epoch, and what decides the order of this epoch and of later ones."""
    epoch = int(getattr(loader, "iteration", 0))
    own: EpochState | None = getattr(loader, "epoch_state", None)
    state = {"iteration": epoch} if own is None else own.state_dict(epoch)
    sampler = _index_sampler(loader)
    for key in ("epoch", "initial_seed"):
        if isinstance(getattr(sampler, key, None), int):
            state[key] = getattr(sampler, key)
    if isinstance(getattr(sampler, "generator", None), torch.Generator):
        state["generator"] = sampler.generator.get_state()
    return state


def go_to_position(loader: DataLoader[Any], state: dict[str, Any]) -> None:
    """Put a loader where `position_of` found one like it.

    Args:
        loader: prepared as the other was.
        state: what `position_of` returned; it has the key `iteration` at least.
    """
    loader.iteration = state["iteration"]
    sampler = _index_sampler(loader)
    for key in ("epoch", "initial_seed"):
        if key in state and hasattr(sampler, key):
            setattr(sampler, key, state[key])
    if "generator" in state and isinstance(getattr(sampler, "generator", None), torch.Generator):
        sampler.generator.set_state(state["generator"])
    own: EpochState | None = getattr(loader, "epoch_state", None)
    if own is not None:
        own.load_state_dict(state)


def _index_sampler(loader: DataLoader[Any]) -> Any:
    """Return the sampler of single indices, None where batches are not made of such."""
    outer = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return getattr(outer, "sampler", None)


def order_of(sampler: Any, *, with_global: bool = False) -> Order:
    """Return what decides the order of a sampler's next epoch.

    Args:
        sampler: a batch sampler or sampler.
        with_global: add torch's global generator where no sampler of a shuffled epoch has one of its own.

    Returns:
        A dict for each sampler, from the outermost to the innermost; see `restore_order`.
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
    """Let the sampler's next epoch have the order of `states`.

    Args:
        sampler: made as the one that `order_of` was called with.
        states: what `order_of` returned.

    Raises:
        ValueError: the states are of other samplers.
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
