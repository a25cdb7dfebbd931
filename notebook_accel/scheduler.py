"""AcceleratedScheduler: a learning rate scheduler that steps when its optimizers really step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import detect
from . import runtime as process
from .gradient_state import GradientState
from .runtime import Runtime
from .takeover.names import complete_names


class AcceleratedScheduler:
    """A wrapper whose `step` steps the schedule only after all optimizers stepped.

    A schedule counts the batches that one process alone would see. N processes see N batches in one step, so each call
    steps the schedule N times. With `split_batches` they share one batch, so each call steps it once.

    Args:
        scheduler: the scheduler to wrap.
        optimizers: its optimizer, or several, as `AcceleratedOptimizer`.
        step_with_optimizer: False steps once at every call, whether the optimizers stepped or not.
        split_batches: True if data loaders split each batch over the processes.
        num_shares: number of processes that see different batches; by default all of the run.
        runtime: its gradient flags say when a step is due; by default the runtime of the process.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        step_with_optimizer: bool = True,
        split_batches: bool = False,
        *,
        num_shares: int | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers: list[Any] = (
            list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
        )
        self.step_with_optimizer = step_with_optimizer
        self.split_batches = split_batches
        self._num_shares = num_shares
        self._runtime = runtime if runtime is not None else process.current()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_runtime": None}

    @property
    def gradient_state(self) -> GradientState:
        """Where gradient accumulation stands."""
        return GradientState()

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the schedule; do nothing while gradients accumulate, whatever `adjust_scheduler` says.

        A call with arguments, such as a metric or an epoch, steps it once: batches are not what it counts. Such a call
        does nothing only inside a block of `accumulate` whose gradients stay.

        Args:
            args: of every step of the wrapped scheduler.
            kwargs: of every step of the wrapped scheduler.
        """
        runtime = detect.find_runtime(self)
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        counts_calls = bool(args or kwargs)
        flags = None if runtime is None else runtime.gradient
        if flags and not flags.sync_gradients and (flags.num_blocks or not counts_calls):
            return
        if counts_calls:
            self.scheduler.step(*args, **kwargs)
            return
        if any(getattr(optimizer, "step_was_skipped", False) for optimizer in self.optimizers):
            return
        if self.split_batches:
            self.scheduler.step()
            return
        shares = 1 if runtime is None else runtime.topology.world_size
        for _ in range(shares if self._num_shares is None else self._num_shares):
            # OneCycleLR raises after its last step, and the last call may ask for more steps than are left.
            total = getattr(self.scheduler, "total_steps", None)
            if total is None or self.scheduler._step_count <= total:
                self.scheduler.step()

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        rates: list[float] = self.scheduler.get_last_lr()
        return rates

    def get_lr(self) -> list[float]:
        """Return the learning rates that the scheduler computes now."""
        rates: list[float] = self.scheduler.get_lr()
        return rates

    def print_lr(self, *args: Any, **kwargs: Any) -> Any:
        """Print the learning rate, if the wrapped scheduler can.

        Args:
            args: of its `print_lr`.
            kwargs: of its `print_lr`.
        """
        return self.scheduler.print_lr(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped scheduler's state."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped scheduler's state.

        Args:
            state_dict: what `state_dict` returned.
        """
        self.scheduler.load_state_dict(state_dict)


complete_names(__name__)
