"""What `prepare` makes of optimizers and schedulers that DeepSpeed trains with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..optimizer import AcceleratedOptimizer
from ..runtime import Runtime
from ..scheduler import AcceleratedScheduler


class DeepSpeedEngineWrapper:
    """An engine of DeepSpeed, whose backward pass is told whether a step follows.

    Args:
        engine: as `deepspeed.initialize` makes it.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Run the backward pass; the step is the optimizer's, `DeepSpeedOptimizerWrapper.step`.

        Args:
            loss: a single number, divided by the batches per step already.
            sync_gradients: whether a step follows.
            kwargs: `retain_graph`.
        """
        with self.adding(sync_gradients):
            self.engine.backward(loss, scale_wrt_gas=False, **kwargs)

    @contextmanager
    def adding(self, sync_gradients: bool) -> Iterator[None]:
        """Let a backward pass of the block add to gradients that wait for a step.

        ZeRO 1 and 2 would forget them where the pass before was told, too, that a step follows.
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
        """Return the norm of all gradients in the last step, None before the first."""
        norm = self.engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    def gradient_norm(self) -> torch.Tensor:
        """Return the norm of the gradients that the next step uses, of all processes; all of them call it."""
        optimizer = self.engine.optimizer
        if hasattr(optimizer, "scaled_global_norm"):  # ZeRO 1 and 2
            return torch.as_tensor(optimizer.scaled_global_norm() / optimizer.loss_scale)
        if hasattr(optimizer, "_get_norm_groups"):  # ZeRO 3, which has no public name for it
            norms = torch.stack(optimizer._get_norm_groups())
            return torch.as_tensor(torch.linalg.vector_norm(norms) / optimizer.loss_scale)
        gradients = [item.grad for item in self.engine.module.parameters() if item.grad is not None]
        scale = getattr(optimizer, "cur_scale", 1.0)
        return torch.nn.utils.get_total_norm(gradients) / scale

    def clip(self, max_norm: float, norm: torch.Tensor) -> None:
        """Let the next step clip the gradients, which have that norm; the config's own limit holds too."""
        optimizer = self.engine.optimizer
        if not hasattr(optimizer, "clip_grad"):  # torch's own, without ZeRO
            torch.nn.utils.clip_grads_with_norm_(self.engine.module.parameters(), max_norm, norm)
            return
        own = self.engine.gradient_clipping()
        optimizer.clip_grad = min(max_norm, own) if own else max_norm

    def step(self) -> None:
        """Let the optimizer and DeepSpeed's scheduler step, and clear the gradients."""
        optimizer = self.engine.optimizer
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.step()
        if hasattr(optimizer, "clip_grad"):
            optimizer.clip_grad = self.engine.gradient_clipping()

    def discard(self) -> None:
        """Forget the gradients, also those that are accumulated."""
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
    """The optimizer of an engine; `step` and `zero_grad` follow gradient accumulation, as those of others.

    Attributes:
        has_gradients: whether there are gradients since the last step.

    Args:
        optimizer: as DeepSpeed makes it.
        engine: that steps with it.
        raw: the user's optimizer in it, None where DeepSpeed's config has it.
        runtime: whose gradient flags decide; by default the runtime of the process.
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
        """True if gradients overflowed and the last step was left out."""
        return bool(getattr(self.optimizer, "overflow", False))

    def note_backward(self) -> None:
        """Note that there are gradients."""
        self.has_gradients = True

    def forget(self) -> None:
        """Note that there are no gradients any more."""
        self.has_gradients = False

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Discard the gradients, unless they are being accumulated; a step has done so already."""
        if self._is_due() and self.has_gradients and self.engine is not None:
            self.engine.discard()
            self.forget()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, unless gradients are being accumulated; ValueError with a closure."""
        if closure is not None:
            raise ValueError("DeepSpeed's optimizers take no closure: call step() after backward()")
        if not self._is_due() or self.engine is None:
            return
        if self._runtime is not None:
            self._runtime.gradient.steps += 1
        if self.has_gradients:
            self.engine.step()
            self.forget()


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """A scheduler that DeepSpeed steps with the optimizer: `step` does nothing."""

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the optimizer's step was the scheduler's too."""
        return None
