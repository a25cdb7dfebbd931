"""Where an epoch stands and what decided its order, so that another process can go on in the middle of it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ..comm.base import Comm
from .indices import draw_seed
from .lead import Lead, begin_without, share_state
from .rounds import Rounds, count_samples, first_rounds
from .samplers import (
    BatchSamplerShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    batches_from,
    is_plain,
    sampler_chain,
)

_END: Final = object()
_DRAWING: Final = (RandomSampler.__iter__, SubsetRandomSampler.__iter__, WeightedRandomSampler.__iter__)
"""How torch's samplers draw, of which it is known what they draw from the global generator."""

Order = list[dict[str, Any]]
"""What decides the order of an epoch, a dict for each sampler; see `order_of`."""


@dataclass(eq=False, kw_only=True, slots=True)
class Epoch:
    """One iterator's way through a loader.

    Attributes:
        rounds: of earlier runs of this epoch.
        round_size: of the loader.
        order: what decides the order of its samples; None before its first batch.
        total: how many batches the iterator draws; None until all are drawn.
        ended: its last batch was handed out; the iteration has not asked for another one.
        is_left: the iterator was closed before its end.
        reader: the iterator of torch or torchdata below, while it is read.
        saved: the state of a stateful loader after the batch that was handed out last.
    """

    rounds: Rounds
    round_size: int | str
    order: Order | None = None
    total: int | None = None
    ended: bool = False
    is_left: bool = False
    reader: Any = None
    saved: dict[str, Any] | None = None

    def leave(self) -> Any:
        """Note that the iterator was closed before its end; return what it read from."""
        self.is_left, reader, self.reader = True, self.reader, None
        return reader


class EpochState:
    """What decides the order of a loader's epochs, and where the loader stands.

    Several iterators may go over one loader, for example one that only looks at the first batch. The loader stands
    where the one does that handed out a batch last, was not left and has not reached its end.

    An iterator that is kept after a look at a batch, beside a whole epoch of another one, cannot be told from a loop
    that measures its own loader inside. So the loader stands where the kept one does: samples may come again, but the
    rest of no loop is lost. The whole epoch counts where the kept iterator was closed before it.

    Attributes:
        next_order: of the next epoch; None leaves it to the samplers.
        ended: the last batch of the interrupted epoch was read.
        interrupted: the order of the epoch in which a checkpoint was saved; `skip_first_batches` goes on with it.
        interrupted_epoch: the number of that epoch.
        interrupted_rounds: of all runs of the interrupted epoch.
        goes_on: another process began this epoch, so that its start draws no random numbers here.
        rounds: of earlier runs of the epoch that this loader goes on with.
        newest: of the iterator that began last.
        epochs: those that have not reached their ends; the last one handed out a batch last.
        parent: the state of the loader that was given to `skip_first_batches`; it is in the same epoch.
    """

    def __init__(self, parent: EpochState | None = None) -> None:
        self.next_order: Order | None = None
        self.interrupted: Order | None = None
        self.interrupted_epoch = 0
        self.interrupted_rounds: Rounds = []
        self.ended = False
        self.goes_on = False
        self.rounds: Rounds = []
        self.newest = Epoch(rounds=[], round_size=1)
        self.parent = parent
        self.epochs: list[Epoch] = [] if parent is None else parent.epochs

    @property
    def current(self) -> Epoch | None:
        """The epoch that the loader is in; where all iterators were left it is that of the latest of them."""
        live = [epoch for epoch in self.epochs if not epoch.is_left]
        return next(reversed(live or self.epochs), None)

    def begin(self, round_size: int | str) -> Epoch:
        """Return the epoch that an iterator starts, and forget those that were left.

        Args:
            round_size: of the loader.
        """
        self.goes_on = self.next_order is not None
        self.newest = Epoch(rounds=self.rounds, round_size=round_size)
        self.epochs[:] = [*(epoch for epoch in self.epochs if not epoch.is_left), self.newest]
        self._forget_interrupted()
        return self.newest

    def draw(self, epoch: Epoch, order: Order) -> None:
        """Note what decided the order of an epoch when its first batch was drawn."""
        self.next_order = None
        epoch.order = order
        self._forget_interrupted()

    def give_turn(self, epoch: Epoch) -> None:
        """Note that the iterator of this epoch hands out a batch, and that of the last one in `epochs` did before."""
        self._drop(epoch)
        self.epochs.append(epoch)

    def end(self, epoch: Epoch) -> None:
        """Note that an iterator reached its end."""
        epoch.reader = None
        self._drop(epoch)
        self._forget_interrupted()

    def leave_all(self) -> None:
        """Forget where the loader stands, until an iterator hands out another batch."""
        self.epochs.clear()

    def after(
        self, epoch: int, num_batches: int, round_size: int | str
    ) -> tuple[EpochState, int, int | None]:
        """Return the state of a loader that skips batches of this one's epoch, its epoch, and its first sample.

        The first sample is None where `num_batches` are batches of this loader.

        If a checkpoint was saved in this epoch, the new loader has the order of that epoch, and skipped batches are
        those of the run that saved it. If the checkpoint was saved with the last batch, `epoch` is the next one
        already: skipped batches are those of the epoch before.

        Args:
            epoch: of the loader.
            num_batches: how many are skipped.
            round_size: of the loader.

        Raises:
            ValueError: where the run that saved the checkpoint stopped has no meaning for this loader.
        """
        made, first = EpochState(self), None
        if self.next_order is not None:
            made.next_order, made.rounds = self.next_order, self.rounds
        elif self.interrupted is not None:
            if self.ended and num_batches > 0 and epoch == self.interrupted_epoch + 1:
                epoch = self.interrupted_epoch
            if epoch == self.interrupted_epoch:
                made.next_order = self.interrupted
                read = first_rounds(self.interrupted_rounds, num_batches)
                if any(size != round_size for _, size in read):
                    made.rounds, first = read, count_samples(read, round_size)
        return made, epoch, first

    def state_dict(self, epoch: int) -> dict[str, Any]:
        """Return where the loader stands in this epoch."""
        current = self.current
        if current is not None and current.order is not None:
            return {
                "iteration": epoch + current.ended,
                "order": current.order,
                "order_of": epoch,
                "rounds": [*current.rounds, (None, current.round_size)],
                "ended": current.ended,
            }
        if self.interrupted is None:
            return {"iteration": epoch}
        return {
            "iteration": epoch,
            "order": self.interrupted,
            "order_of": self.interrupted_epoch,
            "rounds": self.interrupted_rounds,
            "ended": self.ended,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned: the epoch it was called in is the interrupted one."""
        self.leave_all()
        self.interrupted = state.get("order")
        self.interrupted_epoch = state.get("order_of", state["iteration"])
        self.interrupted_rounds = list(state.get("rounds", []))
        self.ended = state.get("ended", False)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy, which no iterator reads."""
        return {**vars(self), "newest": Epoch(rounds=[], round_size=1), "epochs": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.parent is not None:
            self.epochs = self.parent.epochs

    def _drop(self, epoch: Epoch) -> None:
        if epoch in self.epochs:
            self.epochs.remove(epoch)

    def _forget_interrupted(self) -> None:
        state: EpochState | None = self
        while state is not None:
            state.interrupted, state.ended = None, False
            state = state.parent


class ResumableSampler(BatchSampler):
    """A batch sampler, or sampler, whose iterators have `state_dict` and `load_state_dict` for torchdata.

    Args:
        sampler: the batch sampler or sampler.
        epoch_state: of the loader.
        comm: of the ranks that need the same order where no sampler has a generator; None for this one alone.
    """

    def __init__(self, sampler: Any, epoch_state: EpochState, comm: Comm | None = None) -> None:
        self.inner = sampler
        self.epoch_state = epoch_state
        self.comm = comm

    def __getattr__(self, name: str) -> Any:
        if name == "inner" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> ResumableIterator:
        return ResumableIterator(self.inner, self.epoch_state, self.comm)


class ResumableIterator:
    """An iterator over a batch sampler that notes what decided its order when it draws its first batch.

    It draws the indices of one batch ahead: so the last batch is known without reading another one.

    Positions count from the start of the epoch, also where `skip_first_batches` left some batches out. So a state
    fits loaders that skip batches and loaders that do not.

    Args:
        sampler: see `ResumableSampler`.
        epoch_state: see `ResumableSampler`.
        comm: see `ResumableSampler`.
    """

    def __init__(self, sampler: Any, epoch_state: EpochState, comm: Comm | None) -> None:
        self._skipped = 0
        while type(sampler) is SkipBatchSampler:
            self._skipped += sampler.skip_batches
            sampler = sampler.batch_sampler
        self._sampler = sampler
        self._position = self._skipped
        self._epoch_state = epoch_state
        self._comm = comm
        self._lead: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        self._epoch = epoch_state.newest
        self._order: Order | None = None
        self._batches: Iterator[Any] | None = None
        self._has_drawn = False
        self._following: Any = _END
        self._num_drawn = 0
        draws_later = inspect.isgeneratorfunction(getattr(type(sampler), "__iter__", None))
        goes_on = epoch_state.goes_on or epoch_state.next_order is not None
        if comm is None and not goes_on and not draws_later:
            self._iterate()

    def __iter__(self) -> ResumableIterator:
        return self

    def __next__(self) -> Any:
        if not self._has_drawn:
            self._draw(self._epoch_state.next_order)
        batch = self._following
        if batch is _END:
            raise StopIteration
        self._look_ahead()
        self._position += 1
        return batch

    def _look_ahead(self) -> None:
        assert self._batches is not None
        with self._lead:
            self._following = next(self._batches, _END)
        if self._following is _END:
            self._epoch.total = self._num_drawn
        else:
            self._num_drawn += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the position and what decided the order; None where nothing was drawn yet."""
        return {"position": self._position, "order": self._order if self._has_drawn else None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at the position, in the order of the epoch that the state is of."""
        if state_dict["order"] is None:
            return
        self._position = state_dict["position"]
        self._draw(state_dict["order"])

    def _iterate(self) -> None:
        """Iterate the sampler as torch's loaders do, before they draw the seed of loader processes.

        What it draws by then, it draws before them. A generator function draws later.
        """
        before = order_of(self._sampler, with_global=True)
        self._batches = batches_from(self._sampler, self._position)
        if _have_moved(before, order_of(self._sampler, with_global=True)):
            self._order = before

    def _draw(self, order: Order | None) -> None:
        """Start with the batches from the position on, in this order where there is one."""
        here = None if order is None else torch.get_rng_state()
        if order is not None:
            restore_order(self._sampler, order)
        if order is not None or self._order is None:
            self._order = order_of(self._sampler, with_global=True)
        if self._comm is not None and "global" in self._order[-1]:
            if order is None and not _lacks_generator(self._sampler):
                self._batches = begin_without(lambda: batches_from(self._sampler, self._position))
            if self._batches is None:
                if order is None:
                    self._order[-1]["global"] = share_state(self._comm)
                self._lead = Lead(self._order[-1]["global"])
        self._epoch_state.draw(self._epoch, self._order)
        if order is not None or self._batches is None:
            with self._lead:
                self._batches = batches_from(self._sampler, self._position)
        self._has_drawn = True
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
    """Return what decides the order of a sampler's next epoch, whatever the number of processes.

    Args:
        sampler: a batch sampler or sampler.
        with_global: add torch's global generator where no sampler of a shuffled epoch has one of its own.

    Returns:
        A dict for each of the user's samplers, from the outermost to the innermost; see `restore_order`.
    """
    states: Order = []
    parts = _own_parts(sampler)
    for part in parts:
        generator = getattr(part, "generator", None)
        if isinstance(part, SeedableRandomSampler):
            states.append({"epoch": part.epoch, "initial_seed": part.initial_seed})
        elif isinstance(generator, torch.Generator):
            states.append({"generator": generator.get_state()})
        else:
            states.append({})
    if with_global and not any(states) and not _is_sequential(parts):
        states[-1] = {"global": torch.get_rng_state()}
    return states


def _have_moved(before: Order, after: Order) -> bool:
    """Return True if samplers have drawn; not where one got a generator meanwhile, whose state before nobody knows."""
    if [state.keys() for state in before] != [state.keys() for state in after]:
        return False
    return any(
        not torch.equal(value, found[key]) if isinstance(value, torch.Tensor) else value != found[key]
        for state, found in zip(before, after, strict=True)
        for key, value in state.items()
    )


def _lacks_generator(sampler: Any) -> bool:
    """Return True if one of the user's samplers can have a generator and has none; others may draw nothing."""
    return any(getattr(part, "generator", sampler) is None for part in _own_parts(sampler))


def _is_sequential(parts: list[Any]) -> bool:
    """Return True for samplers of which it is known that they draw nothing: the samples come in their order."""
    return isinstance(parts[-1], SequentialSampler) and all(map(is_plain, parts[:-1]))


def _own_parts(sampler: Any) -> list[Any]:
    """Return the user's own samplers of a chain: those that share out and skip decide no order."""
    return [
        part for part in sampler_chain(sampler) if type(part) not in (SkipBatchSampler, BatchSamplerShard)
    ]


def restore_order(sampler: Any, states: Order) -> None:
    """Let the sampler's next epoch have the order of `states`.

    In a run of several processes samplers have generators of their own; alone they draw from the global one.

    Args:
        sampler: made as the one that `order_of` was called with.
        states: what `order_of` returned.

    Raises:
        ValueError: the states are of other samplers.
    """
    parts = _own_parts(sampler)
    if len(parts) != len(states) or not all(map(_fits, parts, states)):
        raise ValueError(
            f"the state is of a loader with {len(states)} samplers, {[sorted(state) for state in states]}, and does "
            f"not fit this one's, {[type(part).__name__ for part in parts]}: make and prepare the loader as before"
        )
    for part, state in zip(parts, states, strict=True):
        if "epoch" in state:
            part.epoch, part.initial_seed = state["epoch"], state["initial_seed"]
        elif "generator" in state:
            if part.generator is None:
                part.generator = torch.Generator()
            part.generator.set_state(state["generator"])
        elif "global" in state and getattr(part, "generator", None) is None:
            torch.set_rng_state(state["global"])
        elif "global" in state:
            part.generator.set_state(_as_own(part, state["global"]))


def _fits(part: Any, state: dict[str, Any]) -> bool:
    if isinstance(part, SeedableRandomSampler) or "epoch" in state:
        return isinstance(part, SeedableRandomSampler) and "epoch" in state
    if "generator" in state:
        return hasattr(part, "generator")
    if "global" in state and isinstance(getattr(part, "generator", None), torch.Generator):
        return type(part).__iter__ in _DRAWING
    return True


def _as_own(sampler: Any, state: torch.Tensor) -> torch.Tensor:
    """Return the state of a sampler's own generator that gives the order which the global one gave."""
    generator = torch.Generator()
    generator.set_state(state)
    if isinstance(sampler, RandomSampler):  # it draws a seed
        generator.manual_seed(draw_seed(generator))
    return generator.get_state()
