"""Hooks around a module's forward that see and change its arguments and its output."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
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
        """Run when the hook is added.

        Args:
            module: the one that the hook is added to.

        Returns:
            The module that gets the hook.
        """
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run before the forward.

        Args:
            module: the one with the hook.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.

        Returns:
            The arguments for the forward.
        """
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Run after the forward.

        Args:
            module: the one with the hook.
            output: what the forward returned.

        Returns:
            The output for the caller.
        """
        return output

    def after_error(self, module: nn.Module, error: BaseException) -> None:
        """Run instead of `post_forward` where the forward or a hook has raised.

        Args:
            module: the one with the hook.
            error: what was raised; it is raised again afterwards.
        """

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Run when the hook is removed or replaced.

        Args:
            module: the one with the hook.
        """
        return module


class SequentialHook(ModelHook):
    """Several hooks as one: each event goes through them in order; one with `no_grad` is enough for all."""

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

    def after_error(self, module: nn.Module, error: BaseException) -> None:
        for hook in self.hooks:
            hook.after_error(module, error)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def single_hooks(hook: ModelHook | None) -> Iterator[ModelHook]:
    """Yield the hooks of a module's hook, which may be none, or several as one."""
    if isinstance(hook, SequentialHook):
        for one in hook.hooks:
            yield from single_hooks(one)
    elif hook is not None:
        yield hook


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
        if hook is None:  # it was removed while another wrapper was around this one
            return self.inner(*args, **kwargs)
        try:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
            forward: Callable[..., Any] = module.__dict__["_old_forward"]
            if hook.no_grad:
                with torch.no_grad():
                    output = forward(*args, **kwargs)
            else:
                output = forward(*args, **kwargs)
            return hook.post_forward(module, output)
        except BaseException as error:
            hook.after_error(module, error)
            raise


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Put a hook around the module's forward, in place, and return the module.

    Args:
        module: gets the attributes `_hf_hook`, the hook, and `_old_forward`, the forward without it.
        hook: its `init_hook` is called first, after the `detach_hook` of one that it replaces.
        append: True keeps a hook that is there and runs the new one after it; False replaces it.

    Raises:
        TypeError: it is no module, or no hook.
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

    Weights that the hook brought for the forward alone are read into memory.

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
        # a wrapper that was put around the hooked forward stays, and calls the forward inside
        if isinstance(state.get("forward"), HookedForward):
            del state["forward"]
            if not isinstance(inner, ClassForward):
                state["forward"] = inner
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Take the hooks off the module and all modules inside; see `remove_hook_from_module`."""
    remove_hook_from_module(module, recurse=True)


def has_forward(module: nn.Module) -> bool:
    """Return True for a module that can be called, which a `ParameterList` or a `ModuleDict` cannot be."""
    own = vars(module).get("_old_forward", vars(module).get("forward"))
    if own is not None and not isinstance(own, ClassForward):
        return True
    return type(module).forward is not nn.Module.forward


def outside_graphs(function: _Function) -> _Function:
    """Return a function that torch.compile leaves out of its graphs; torch._dynamo is not imported before its use."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break()
            return torch._dynamo.disable(function)(*args, **kwargs)  # the compiler would trace it otherwise
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]
