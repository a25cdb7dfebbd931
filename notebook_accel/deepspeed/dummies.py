"""Stand-ins for the optimizer and the scheduler that DeepSpeed creates from its own config."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final

_MARK: Final = "_dummy_scheduler"


class DummyOptim:
    """Stands for the optimizer of DeepSpeed's config: pass it to `prepare`, which returns the real one.

    Args:
        params: parameters or parameter groups.
        lr: replaces an "auto" in `optimizer.params.lr`.
        weight_decay: replaces an "auto" in `optimizer.params.weight_decay`.
        kwargs: replace an "auto" in the `optimizer.params` of the same names.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 0.001, weight_decay: float = 0, **kwargs: Any
    ) -> None:
        self.params = list(params)
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler:
    """Stands for the scheduler of DeepSpeed's config: pass it to `prepare`, which returns the real one.

    Numbers of steps are those that one process alone would take, as for every prepared scheduler; with
    `split_batches` they are the steps of the run. DeepSpeed steps the scheduler together with the optimizer.

    Args:
        optimizer: the `DummyOptim` or optimizer of this scheduler.
        total_num_steps: replaces an "auto" in `scheduler.params.total_num_steps`.
        warmup_num_steps: replaces an "auto" in `scheduler.params.warmup_num_steps`.
        lr_scheduler_callable: returns a scheduler for the optimizer it gets; used instead of the config.
        kwargs: replace an "auto" in the `scheduler.params` of the same names.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs
        with contextlib.suppress(
            AttributeError
        ):  # it has slots: then it has to be prepared with the scheduler
            setattr(optimizer, _MARK, weakref.ref(self))


def dummy_of(optimizer: Any) -> DummyScheduler | None:
    """Return the last `DummyScheduler` that was made for an optimizer, None if nobody keeps one.

    Args:
        optimizer: of torch, or a `DummyOptim`.
    """
    found = getattr(optimizer, _MARK, None)
    return None if found is None else found()


def parameters_of(optimizer: Any) -> list[Any]:
    """Return the parameters that an optimizer trains.

    Args:
        optimizer: of torch, or a `DummyOptim`.
    """
    groups = optimizer.params if isinstance(optimizer, DummyOptim) else optimizer.param_groups
    return [item for group in groups for item in (group["params"] if isinstance(group, dict) else [group])]
