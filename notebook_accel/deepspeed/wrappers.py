"""Wraps DeepSpeed's engines, optimizers and schedulers, so that a loop uses them like any others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from ..combinations import refuse
from ..optimizer import AcceleratedOptimizer
from ..runtime import Runtime
from ..scheduler import AcceleratedScheduler

_SMALLEST: Final = torch.finfo(torch.float32).tiny
"""Stands for a limit of 0, which to DeepSpeed means none."""


class DeepSpeedEngineWrapper:
    """An engine of DeepSpeed; the caller says for each backward pass whether a step follows.

    Args:
        engine: what `deepspeed.initialize` returns.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Run the backward pass; `DeepSpeedOptimizerWrapper.step` steps.

        Args:
            loss: of shape [], already divided by the batches per step.
            sync_gradients: whether a step follows.
            kwargs: `retain_graph`.
        """
        with self.accumulate(sync_gradients):
            self.engine.backward(loss, scale_wrt_gas=False, **kwargs)

    @contextmanager
    def accumulate(self, sync_gradients: bool) -> Iterator[None]:
        """Return a context whose backward pass adds to the gradients that wait for a step.

        ZeRO 1 and 2 drop those gradients if a step was to follow the previous pass too. The context adds them again.

        Args:
            sync_gradients: whether a step follows.
        """
        self.engine.set_gradient_accumulation_boundary(sync_gradients)
        waiting = dict(getattr(self.engine.optimizer, "averaged_gradients", {}))
        yield
        if not waiting or not hasattr(self.engine.optimizer, "scaled_global_norm"):
            return
        for group, before in waiting.items():
            now = self.engine.optimizer.averaged_gradients[group]
            if before is not None and now is not None and now is not before:
                torch._foreach_add_(now, before)

    def get_global_grad_norm(self) -> float | None:
        """Return the 2-norm of all gradients in the last step, None before the first step."""
        norm = self.engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    def gradient_norm(self) -> torch.Tensor:
        """Return the 2-norm of the gradients of the next step, over all processes; every process has to call it."""
        optimizer = self.engine.optimizer
        if hasattr(optimizer, "scaled_global_norm"):  # ZeRO 1 and 2
            return torch.as_tensor(optimizer.scaled_global_norm() / optimizer.loss_scale)
        if hasattr(optimizer, "_get_norm_groups"):  # ZeRO 3, which has no public name for it
            norms = torch.stack(optimizer._get_norm_groups())
            return torch.as_tensor(torch.linalg.vector_norm(norms) / optimizer.loss_scale)
        if hasattr(optimizer, "get_grads_for_norm"):  # bf16 whose gradients accumulate elsewhere, in float32
            gradients = optimizer.get_grads_for_norm(for_clipping=True)
        else:
            gradients = [item.grad for item in self.engine.module.parameters() if item.grad is not None]
        parts = [torch.linalg.vector_norm(item, dtype=torch.float32) for item in gradients]
        norm = torch.linalg.vector_norm(torch.stack(parts or [torch.zeros(())]))
        return torch.as_tensor(norm / getattr(optimizer, "cur_scale", 1.0))

    def clip(self, max_norm: float, norm: torch.Tensor) -> None:
        """Clip the gradients in the next step; the config's own limit applies too.

        Args:
            max_norm: the limit.
            norm: the norm of the gradients, see `gradient_norm`.
        """
        optimizer = self.engine.optimizer
        if not hasattr(optimizer, "clip_grad"):  # torch's own, without ZeRO
            torch.nn.utils.clip_grads_with_norm_(self.engine.module.parameters(), max_norm, norm)
            return
        own = self.engine.gradient_clipping()
        optimizer.clip_grad = max(min(max_norm, own) if own else max_norm, _SMALLEST)

    def step(self) -> None:
        """Step the optimizer and DeepSpeed's scheduler, and clear the gradients."""
        optimizer = self.engine.optimizer
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.step()
        if hasattr(optimizer, "clip_grad"):
            optimizer.clip_grad = self.engine.gradient_clipping()

    def discard(self) -> None:
        """Clear the gradients, accumulated ones too."""
        optimizer = self.engine.optimizer
        optimizer.zero_grad()
        gradients = getattr(optimizer, "averaged_gradients", None)
        if hasattr(optimizer, "scaled_global_norm") and gradients is not None:  # ZeRO 1 and 2 keep them
            for group in list(gradients):
                gradients[group] = None
                optimizer.all_grad_tensors[group] = None
            optimizer.micro_step_id = -1
            if optimizer.cpu_offload:
                optimizer.reset_cpu_buffers()


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """The optimizer of an engine; like others, it neither steps nor clears while gradients accumulate.

    Attributes:
        has_gradients: whether a backward pass ran since the last step.

    Args:
        optimizer: DeepSpeed's.
        engine: steps with the optimizer.
        raw: the user's optimizer inside it; None where it comes from DeepSpeed's config.
        runtime: its gradient flags say when a step is due; by default the runtime of the process.
    """

    def __init__(
        self,
        optimizer: Any,
        engine: DeepSpeedEngineWrapper | None = None,
        raw: Any = None,
        *,
        runtime: Runtime | None = None,
    ) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None, runtime=runtime)
        self.engine: Any = engine
        self.raw = raw
        self.has_gradients = False

    def __repr__(self) -> str:
        return f"DeepSpeedOptimizerWrapper({type(self.optimizer).__name__})"

    @property
    def step_was_skipped(self) -> bool:
        """True if gradients overflowed, so that the last step was skipped."""
        return bool(getattr(self.optimizer, "overflow", False))

    def note_backward(self) -> None:
        """Remember that there are gradients."""
        self.has_gradients = True

    def note_no_gradients(self) -> None:
        """Remember that there are no gradients."""
        self.has_gradients = False

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, unless they are being accumulated; a step has cleared them already.

        Args:
            set_to_none: has no effect.
        """
        if self._is_due() and self.has_gradients and self.engine is not None:
            self.engine.discard()
            self.note_no_gradients()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, unless gradients are being accumulated.

        Args:
            closure: must be None.

        Raises:
            ValueError: a closure was given.
        """
        if closure is not None:
            raise refuse("deepspeed, closure")
        if not self._is_due() or self.engine is None:
            return
        if self._runtime is not None:
            self._runtime.gradient.steps += 1
        if self.has_gradients:
            self.engine.step()
            self.note_no_gradients()


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """A scheduler that DeepSpeed steps together with the optimizer."""

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the step of the optimizer has stepped the scheduler."""
        return None
