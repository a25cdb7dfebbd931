"""Stand-ins for the optimizer and the scheduler that DeepSpeed makes as its own config says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class DummyOptim:
    """What a loop passes to `prepare` where DeepSpeed's config has the optimizer; `prepare` returns that one.

    Args:
        params: parameters or parameter groups.
        lr: for `optimizer.params.lr` where that is "auto".
        weight_decay: for `optimizer.params.weight_decay` where that is "auto".
        kwargs: for parameters of the same names where they are "auto".
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 0.001, weight_decay: float = 0, **kwargs: Any
    ) -> None:
        self.params = list(params)
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler:
    """What a loop passes to `prepare` where DeepSpeed's config has the scheduler; `prepare` returns that one.

    Steps are counted as for every schedule that is prepared: as one process would take them, unless batches are
    split. DeepSpeed steps the scheduler with the optimizer.

    Args:
        optimizer: the `DummyOptim` or optimizer.
        total_num_steps: for `scheduler.params.total_num_steps` where that is "auto".
        warmup_num_steps: for `scheduler.params.warmup_num_steps` where that is "auto".
        lr_scheduler_callable: makes the scheduler of an optimizer, instead of the config.
        kwargs: for parameters of the same names where they are "auto".
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
