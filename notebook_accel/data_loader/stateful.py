"""Prepared loaders that are loaders of torchdata too, so that an epoch can be gone on with after its last batch.

Imported only where one is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from torchdata.stateful_dataloader import StatefulDataLoader

from .base import PreparedLoader, outer_sampler
from .dispatch import DataLoaderDispatcher
from .resume import order_of, restore_order
from .shard import DataLoaderShard
from .skip import SkipDataLoader

if TYPE_CHECKING:
    from typing_extensions import Self

_EPOCH: Final = "_iteration"
_ORDER: Final = "_order"
_FINISHED: Final = "_iterator_finished"
_RECEIVES: Final = "_receives"
_ALONE: Final = "_num_yielded"
_WORKERS: Final = "_snapshot"


class StatefulLoader(PreparedLoader, StatefulDataLoader):  # type: ignore[misc]
    """A prepared loader whose `state_dict` is that of torchdata, taken before the next batch is read ahead.

    Ours is added to it: the epoch, and what decided its order, so that a loader that is made anew goes on with the
    very next batch. The state of the last batch starts the next epoch.
    """

    use_stateful_dataloader = True

    def __init__(self, *args: Any, use_stateful_dataloader: bool = True, **kwargs: Any) -> None:
        self._state: dict[str, Any] | None = None
        self._goes_on = False  # the next epoch is one of which the first batches were read by another process
        self._inside = False  # this one is
        super().__init__(*args, use_stateful_dataloader=use_stateful_dataloader, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_initial_iter_for_state_dict": False}

    def after(self, skip_batches: int, samplers: dict[str, Any]) -> Self:
        made = super().after(skip_batches, samplers)
        made.__dict__.update(_state=None, _goes_on=False, next_iter_state=None)
        return made

    @property
    def _reads(self) -> bool:
        """True where this process reads, False where it only receives."""
        return True

    def _get_iterator(self) -> Any:
        state = self.next_iter_state
        iterator = super()._get_iterator()
        if state is not None:
            # torchdata counts the batches that it reads again on top of those that it starts from.
            parts = state[_WORKERS] if self.num_workers else state
            iterator._num_yielded = parts["_snapshot_step"] if self.num_workers else parts[_ALONE]
            iterator._num_yielded += state.get("_steps_since_snapshot", 0)
        return iterator

    def begin(self) -> None:
        super().begin()
        self._inside, self._goes_on = self._goes_on, False
        self.course.goes_on |= self._inside

    def _batches_to_skip(self) -> int:
        return 0 if self._inside else self.skip_batches

    def _inner_state(self) -> dict[str, Any]:
        state: dict[str, Any] = super(PreparedLoader, self).state_dict() if self._reads else {_RECEIVES: True}
        return state

    def _note_state(self) -> None:
        self._state = {**self._inner_state(), _FINISHED: False, _EPOCH: self.iteration}

    def _reach_end(self) -> None:
        super()._reach_end()
        self._state = {
            **self._inner_state(),
            _FINISHED: True,
            _EPOCH: self.iteration + 1,
            _ORDER: order_of(outer_sampler(self)),
        }

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        if self._state is not None and self._state[_FINISHED]:
            self._state = {**self._state, _EPOCH: epoch}

    def state_dict(self) -> dict[str, Any]:
        if self._state is None:
            return {_FINISHED: True, _EPOCH: self.iteration, _ORDER: order_of(outer_sampler(self))}
        return dict(self._state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        finished = bool(state_dict.get(_FINISHED, False))
        if self._reads and not finished:
            self._check(state_dict)
        order = state_dict.get(_ORDER)
        if order is not None:
            restore_order(outer_sampler(self), order)
        # Persistent workers draw no seed for the second epoch; those that are started for it here do.
        self.course.next_order = order if self.persistent_workers else None
        super(PreparedLoader, self).load_state_dict(state_dict if self._reads and not finished else {})
        self.iteration = state_dict.get(_EPOCH, self.iteration)
        self._goes_on = not finished
        self._state = {_EPOCH: self.iteration, _FINISHED: finished, **state_dict}

    def _check(self, state_dict: dict[str, Any]) -> None:
        if state_dict.get(_RECEIVES):
            raise ValueError(
                "the state is of a process that only receives batches: rank 0 needs the state of rank 0"
            )
        wanted = _WORKERS if self.num_workers else _ALONE
        if wanted not in state_dict:
            raise ValueError(
                f"the state is not of a loader with num_workers={self.num_workers}: it has "
                f"{sorted(state_dict)}, not {wanted!r}; go on with as many worker processes as before"
            )
        if self.num_workers and len(state_dict[_WORKERS]["_worker_snapshots"]) != self.num_workers:
            raise ValueError(
                f"the state is of a loader with num_workers={len(state_dict[_WORKERS]['_worker_snapshots'])}, this "
                f"one has {self.num_workers}: go on with as many worker processes as before"
            )


class StatefulShard(StatefulLoader, DataLoaderShard):
    """`DataLoaderShard` with a state."""


class StatefulDispatcher(StatefulLoader, DataLoaderDispatcher):
    """`DataLoaderDispatcher` with a state: that of rank 0 has the position, the others note the epoch alone.

    A last batch that is completed is so from the first batch that was read since the state was loaded.
    """

    @property
    def _reads(self) -> bool:
        return self._place().topology.rank == 0


class StatefulSkipLoader(StatefulLoader, SkipDataLoader):
    """`SkipDataLoader` with a state."""


def stateful_class(kind: type[PreparedLoader]) -> type[Any]:
    """Return the stateful loader that is a `kind`.

    Raises:
        TypeError: there is none.
    """
    for candidate in (StatefulShard, StatefulDispatcher, StatefulSkipLoader):
        if kind in candidate.__bases__:
            return candidate
    raise TypeError(
        f"use_stateful_dataloader=True needs DataLoaderShard, DataLoaderDispatcher or SkipDataLoader, not {kind}"
    )
