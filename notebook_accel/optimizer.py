"""AcceleratedOptimizer: an optimizer that steps only when gradients are complete."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch

from . import detect
from . import runtime as process
from .combinations import refuse
from .gradient_state import GradientState
from .runtime import Runtime
from .state import AcceleratorState
from .takeover.names import complete_names


class StepHooks(Protocol):
    """Is called before and after each step of a raw optimizer."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Run before a step.

        Args:
            optimizer: the raw optimizer.
        """

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Run after a step.

        Args:
            optimizer: the raw optimizer.
        """


class AcceleratedOptimizer(torch.optim.Optimizer):
    """A wrapper whose `step` and `zero_grad` do nothing while gradients accumulate.

    All other attributes are those of the wrapped optimizer. A LOMO optimizer changes weights inside
    `Accelerator.lomo_backward`, so its `step` does nothing.

    Attributes:
        optimizer: the wrapped optimizer.
        raw: the user's optimizer, if the wrapped one is a library's wrapper of it; else None.
        steps_in_backward: whether it is a LOMO optimizer.

    Args:
        optimizer: the optimizer to wrap.
        device_placement: move the state that it already has to the device of its parameters.
        scaler: a `GradScaler` for float16.
        runtime: its gradient flags say when a step is due; by default the runtime of the process.
        hooks: called before and after each step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device_placement: bool = True,
        scaler: Any = None,
        *,
        runtime: Runtime | None = None,
        hooks: StepHooks | None = None,
    ) -> None:
        # The base class is not initialised: state, groups and hooks belong to the wrapped optimizer.
        self.optimizer = optimizer
        self.scaler = scaler
        self.device_placement = device_placement
        self._runtime = runtime if runtime is not None else process.current()
        self._hooks = hooks
        self.raw: Any = None
        self._is_overflow = False
        self._takes_set_to_none = "set_to_none" in inspect.signature(optimizer.zero_grad).parameters
        # the module's name, because the import of lomo_optim imports transformers
        self.steps_in_backward = any(
            kind.__module__.partition(".")[0] == "lomo_optim" for kind in type(optimizer).__mro__
        )
        if device_placement and optimizer.state:
            optimizer.load_state_dict(optimizer.state_dict())

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # unpickling asks for it before it is set
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_runtime": None, "_hooks": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"

    @property
    def accelerator_state(self) -> AcceleratorState:
        """What the process is to the run."""
        return AcceleratorState(_from_accelerator=True)

    @property
    def gradient_state(self) -> GradientState:
        """Where gradient accumulation stands."""
        return GradientState()

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state by parameter."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's parameter groups."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's default options."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    @property
    def step_was_skipped(self) -> bool:
        """True if the scaler found infinite or NaN gradients and skipped the last step."""
        return self._is_overflow

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimizer.

        Args:
            param_group: parameters and their options.
        """
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state.

        Args:
            state_dict: what `state_dict` returned.
        """
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Switch to training mode, if the optimizer has one, as schedule-free optimizers do."""
        self._switch("train")

    def eval(self) -> None:
        """Switch to evaluation mode, if the optimizer has one, as schedule-free optimizers do."""
        self._switch("eval")

    def _switch(self, mode: str) -> None:
        for optimizer in (self.optimizer, getattr(self.optimizer, "optimizer", None)):
            switch = getattr(optimizer, mode, None)
            if callable(switch):
                switch()
                return

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, unless they are being accumulated.

        Args:
            set_to_none: passed on to the wrapped optimizer; by default True where that takes it.

        Raises:
            ValueError: the wrapped optimizer does not take `set_to_none`.
        """
        if not self._is_due():
            return
        if self._takes_set_to_none:
            self.optimizer.zero_grad(set_to_none=True if set_to_none is None else set_to_none)
        elif set_to_none is None:
            self.optimizer.zero_grad()
        else:
            raise ValueError(
                f"zero_grad of {type(self.optimizer).__name__} does not take set_to_none={set_to_none}: "
                "leave it out"
            )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, unless gradients are being accumulated.

        Args:
            closure: computes the loss again; passed on to the wrapped optimizer.

        Returns:
            What the wrapped optimizer returns; None if it did not step.

        Raises:
            ValueError: a closure was given, and the loss is scaled.
        """
        if closure is not None and self.scaler is not None and self.scaler.is_enabled():
            raise refuse("closure, fp16")
        if self.steps_in_backward or not self._is_due():
            return None
        arguments = () if closure is None else (closure,)
        if (runtime := self._runtime) is not None:
            runtime.gradient.steps += 1
        if self._hooks is not None:
            return self._step_between(self._hooks, arguments)
        if self.scaler is None:
            return self.optimizer.step(*arguments)
        return self._step_scaled(arguments)

    def _step_between(self, hooks: StepHooks, arguments: tuple[Any, ...]) -> Any:
        hooks.before_step(self.optimizer)
        result = self.optimizer.step(*arguments) if self.scaler is None else self._step_scaled(arguments)
        hooks.after_step(self.optimizer)
        return result

    def _is_due(self) -> bool:
        runtime = detect.find_runtime(self)
        return runtime is None or runtime.gradient.sync_gradients

    def _step_scaled(self, arguments: tuple[Any, ...]) -> Any:
        request_update = getattr(self.scaler, "request_update", None)
        if request_update is not None:
            result = self.scaler.step(self.optimizer, *arguments)
            self._is_overflow = self.scaler.found_inf(self.optimizer)
            request_update()
            return result
        # Optimizers that unscale by themselves always run. A smaller scale means that they changed nothing.
        hooked = hasattr(self.optimizer, "register_step_post_hook")
        if not hooked or getattr(self.optimizer, "_step_supports_amp_scaling", False):
            before = self.scaler.get_scale()
            result = self.scaler.step(self.optimizer, *arguments)
            self.scaler.update()
            self._is_overflow = self.scaler.get_scale() < before
            return result
        stepped: list[bool] = []
        hook = self.optimizer.register_step_post_hook(lambda *_: stepped.append(True))
        try:
            result = self.scaler.step(self.optimizer, *arguments)
        finally:
            hook.remove()
        self.scaler.update()
        self._is_overflow = self.scaler.is_enabled() and not stepped
        return result

    def _switch_parameters(self, parameters_map: dict[torch.Tensor, torch.Tensor]) -> None:
        """Replace parameters in all groups."""
        for group in self.optimizer.param_groups:
            group["params"][:] = [parameters_map.get(parameter, parameter) for parameter in group["params"]]


complete_names(__name__)
