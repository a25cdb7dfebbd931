"""Hooks around a module's forward that see and change its arguments and its output."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import torch
from torch import nn

_Function = TypeVar("_Function", bound=Callable[..., Any])
_NAMES: Final = ("__module__", "__name__", "__qualname__", "__doc__")


class ModelHook:
    """What happens around a module's forward; a subclass overrides what it needs.

    Attributes:
        no_grad: True runs the forward without recording gradients.
    """

    no_grad: bool = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Run when the hook is added; the module that it returns is the one that gets the hook."""
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run before the forward and return the arguments for it."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Run after the forward and return the output for the caller."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Run when the hook is removed or replaced."""
        return module


class SequentialHook(ModelHook):
    """Several hooks as one: each event goes through them in order, and one without gradients is enough for all."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    @property
    def no_grad(self) -> bool:  # type: ignore[override]
        """True if one of the hooks wants it."""
        return any(hook.no_grad for hook in self.hooks)

    def init_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


class ClassForward:
    """The forward of a module's class as it is at each call: compiled graphs replace theirs.

    A bound method in the module's own `__dict__` would be pickled as the attribute `forward`, which is the hooked one.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return type(self.module).forward.__get__(self.module)  # type: ignore[no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.module).forward(self.module, *args, **kwargs)


class HookedForward:
    """A forward with the module's hook around it; its signature, name and text are those of the forward inside."""

    def __init__(self, module: nn.Module, inner: Callable[..., Any]) -> None:
        self.module = module
        self.inner = inner
        named = inner.__wrapped__ if isinstance(inner, ClassForward) else inner
        for name in _NAMES:
            if hasattr(named, name):
                setattr(self, name, getattr(named, name))

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        hook = getattr(module, "_hf_hook", None)
        if hook is None:  # removed while something else was wrapped around this
            return self.inner(*args, **kwargs)
        args, kwargs = hook.pre_forward(module, *args, **kwargs)
        forward: Callable[..., Any] = vars(module)["_old_forward"]
        if hook.no_grad:
            with torch.no_grad():
                output = forward(*args, **kwargs)
        else:
            output = forward(*args, **kwargs)
        return hook.post_forward(module, output)


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Put a hook around the module's forward, in place, and return the module.

    Args:
        module: gets the attributes `_hf_hook`, the hook, and `_old_forward`, the forward without it.
        hook: its `init_hook` is called first, after the `detach_hook` of one that it replaces.
        append: True keeps a hook that is there and runs the new one after it; False replaces it.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"a hook is added to a torch.nn.Module, not to {module!r}")
    if not isinstance(hook, ModelHook):
        raise TypeError(f"a hook is an instance of ModelHook, not {hook!r}")
    present: ModelHook | None = vars(module).get("_hf_hook")
    if present is not None and not append:
        present.detach_hook(module)
    module = hook.init_hook(module)
    state = vars(module)
    if "_old_forward" not in state:
        inner = state.get("forward", None)
        state["_old_forward"] = ClassForward(module) if inner is None else inner
        state["forward"] = HookedForward(module, state["_old_forward"])
    state["_hf_hook"] = hook if present is None or not append else SequentialHook(present, hook)
    return module


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Take the hook off, in place, so that the module has its own forward again, and return the module.

    Args:
        module: with or without a hook.
        recurse: do the same for all modules inside.
    """
    state = vars(module)
    hook: ModelHook | None = state.get("_hf_hook")
    if hook is not None:
        hook.detach_hook(module)
        del state["_hf_hook"]
    if "_old_forward" in state:
        inner = state.pop("_old_forward")
        # what was wrapped around the hooked forward since then stays, and calls the forward inside it
        if isinstance(state.get("forward"), HookedForward):
            del state["forward"]
            if not isinstance(inner, ClassForward):
                state["forward"] = inner
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Take the hooks off the module and all modules inside."""
    remove_hook_from_module(module, recurse=True)


def _outside_graphs(function: _Function) -> _Function:
    """Return a function that torch.compile leaves out of its graphs; torch._dynamo is not imported before its use."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break()
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


class LayerwiseCastingHook(ModelHook):
    """Keeps a module's weights in one dtype and computes in another: for inference that saves memory.

    Args:
        storage_dtype: of the weights between forwards, such as `torch.float8_e4m3fn`.
        compute_dtype: of the weights in the forward, and after the hook is removed.
        non_blocking: copy without waiting, where the device can.
    """

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        for name, dtype in (("storage_dtype", storage_dtype), ("compute_dtype", compute_dtype)):
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise ValueError(f"{name} is a floating point dtype of torch, not {dtype!r}")
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        return self._cast(module, self.storage_dtype)

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._cast(module, self.compute_dtype)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self._cast(module, self.storage_dtype)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        return self._cast(module, self.compute_dtype)

    @_outside_graphs
    def _cast(self, module: nn.Module, dtype: torch.dtype) -> nn.Module:
        return module.to(dtype=dtype, non_blocking=self.non_blocking)


_CASTABLE: Final = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Sequence[str] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Give every linear and convolution layer a `LayerwiseCastingHook`; other layers keep their dtype.

    Args:
        module: the model, or one layer.
        storage_dtype: of the layers' weights between forwards.
        compute_dtype: of the layers' weights in the forward.
        skip_modules_pattern: regular expressions; a module whose name matches one is left out with all inside it.
        skip_modules_classes: modules of these classes are left out with all inside them.
        non_blocking: copy without waiting, where the device can.
    """
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else skip_modules_pattern or ()
    compiled = [re.compile(pattern) for pattern in patterns]
    skipped = tuple(skip_modules_classes or ())
    LayerwiseCastingHook(
        storage_dtype, compute_dtype, non_blocking
    )  # wrong dtypes raise before a layer changes

    def attach(part: nn.Module, name: str) -> None:
        if isinstance(part, skipped) or any(pattern.search(name) for pattern in compiled):
            return
        if isinstance(part, _CASTABLE):
            add_hook_to_module(
                part, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True
            )
            return
        for child_name, child in part.named_children():
            attach(child, f"{name}.{child_name}" if name else child_name)

    attach(module, "")
