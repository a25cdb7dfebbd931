"""Compiles prepared models by torch.compile, as a whole or block by block."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch

from . import environ
from .choices import Choice
from .handlers import KwargsHandler


class DynamoBackend(Choice):
    """The backend of `torch.compile`; NO compiles nothing."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Arguments of `torch.compile` for all prepared models; ACCELERATE_DYNAMO_* variables replace a None.

    Attributes:
        backend: in any case; by default NO, which compiles nothing.
        mode: `default`, `reduce-overhead`, `max-autotune` or another mode of torch.
        fullgraph: raise if the model is not a single graph.
        dynamic: True compiles kernels for any shape, False for one shape; None lets torch decide.
        options: of the backend; excludes `mode`.
        disable: wrap the model but compile nothing.
        use_regional_compilation: compile each block of a `ModuleList` of equal blocks by itself. The blocks share their
            code, so this takes a fraction of the time.

    Raises:
        ValueError: the backend is unknown, or both `mode` and `options` are set.
    """

    backend: DynamoBackend | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def _complete_fields(self) -> None:
        word = self.backend if self.backend is not None else environ.get("ACCELERATE_DYNAMO_BACKEND") or "no"
        if str(word).upper() not in DynamoBackend:
            legal = ", ".join(name.lower() for name in DynamoBackend.list())
            raise ValueError(f"dynamo backend {str(word)!r} is unknown, choose among {legal}")
        self.backend = DynamoBackend(str(word).upper())
        if self.mode is None:
            self.mode = environ.get("ACCELERATE_DYNAMO_MODE") or "default"
        if self.mode != "default" and self.options is not None:
            raise ValueError(
                f"mode={self.mode!r} and options={self.options!r} exclude each other: give one of them"
            )
        if self.fullgraph is None:
            self.fullgraph = environ.flag("ACCELERATE_DYNAMO_USE_FULLGRAPH")
        if self.dynamic is None and environ.get("ACCELERATE_DYNAMO_USE_DYNAMIC") and self._fills("dynamic"):
            self.dynamic = environ.flag("ACCELERATE_DYNAMO_USE_DYNAMIC")
        if self.use_regional_compilation is None:
            self.use_regional_compilation = environ.flag("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION")

    @property
    def is_active(self) -> bool:
        """True if models are to be compiled."""
        return self.backend is not DynamoBackend.NO

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of all fields; the backend has the name that torch uses."""
        return {**super().to_dict(), "backend": str(self.backend).lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of `torch.compile` that differ from its defaults."""
        plain = {"backend": "no", "mode": "default", "fullgraph": False, "dynamic": None, "options": None}
        plain["disable"] = False
        given = self.to_dict()
        return {name: given[name] for name, default in plain.items() if given[name] != default}


def choose(backend: Any, plugin: TorchDynamoPlugin | None) -> TorchDynamoPlugin:
    """Return how an accelerator compiles models; where both arguments are None, the environment decides.

    Args:
        backend: the argument `dynamo_backend`, None where it was not given.
        plugin: the argument `dynamo_plugin`, likewise.

    Raises:
        ValueError: both arguments were given, or the backend is unknown.
        TypeError: the plugin is no `TorchDynamoPlugin`.
    """
    if plugin is not None:
        if backend is not None:
            raise ValueError("dynamo_backend and dynamo_plugin were both given: set backend in the latter")
        if not isinstance(plugin, TorchDynamoPlugin):
            raise TypeError(f"dynamo_plugin must be a TorchDynamoPlugin, not {plugin!r}")
        return plugin
    return TorchDynamoPlugin(backend=backend)


def compile_model(model: torch.nn.Module, plugin: TorchDynamoPlugin) -> torch.nn.Module:
    """Return the model compiled, or unchanged if it is compiled already.

    Args:
        model: any.
        plugin: how to compile it.
    """
    if not plugin.is_active or is_compiled_module(model) or "_orig_mod" in vars(model):
        return model
    if plugin.use_regional_compilation:
        return compile_regions(model, **plugin.to_kwargs())
    return _compile(model, plugin.to_kwargs())


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Return True if a module is the result of `torch.compile`.

    Args:
        module: any.
    """
    # without the module nothing is compiled yet, and its import takes a second
    frames = sys.modules.get("torch._dynamo.eval_frame")
    kind = getattr(frames, "OptimizedModule", None)
    return kind is not None and isinstance(module, kind)


def has_compiled_regions(module: torch.nn.Module) -> bool:
    """Return True if a module or one of its submodules was compiled.

    Args:
        module: any.
    """
    return any(is_compiled_module(part) for part in module.modules())


def plain_name(name: str) -> str:
    """Return the name that a weight has where no part of the model is compiled.

    Args:
        name: in a state dict; `torch.compile` puts `_orig_mod` between the names of a part and of what is in it.
    """
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def find_original(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return the module that was compiled, None if this one is not the result.

    Args:
        module: perhaps compiled, as a whole or block by block.
    """
    if is_compiled_module(module):
        inner: torch.nn.Module = module._orig_mod  # type: ignore[assignment]
        return inner
    found: torch.nn.Module | None = vars(module).get("_orig_mod")
    return found


def compile_like(compiled: Any, inner: torch.nn.Module) -> torch.nn.Module:
    """Return a module compiled with the arguments of another.

    Args:
        compiled: the result of `torch.compile`.
        inner: the module to compile.
    """
    result: torch.nn.Module = type(compiled)(inner, compiled.dynamo_ctx)
    return result


def compile_regions(module: torch.nn.Module, **compile_kwargs: Any) -> torch.nn.Module:
    """Return a module whose repeated blocks are compiled one by one; it has the same parameters and buffers.

    A `ModuleList` of blocks of one class is compiled block by block. A submodule without such a list is compiled as a
    whole.

    Args:
        module: does not change; the result has it as `_orig_mod`.
        compile_kwargs: arguments of `torch.compile`.
    """
    if _is_repeated(module):
        blocks = torch.nn.ModuleList([_compile(block, compile_kwargs) for block in module.children()])
        vars(blocks)["_orig_mod"] = module
        return blocks
    if any(_is_repeated(part) for part in module.modules()):
        return _copy_with_regions(module, compile_kwargs)
    return _compile(module, compile_kwargs)


def _compile(module: torch.nn.Module, arguments: dict[str, Any]) -> torch.nn.Module:
    if is_compiled_module(module):
        return module
    compiled: Any = torch.compile(module, **arguments)
    result: torch.nn.Module = compiled
    return result


def _is_repeated(module: torch.nn.Module) -> bool:
    blocks = list(module.children())
    return (
        isinstance(module, torch.nn.ModuleList)
        and bool(blocks)
        and all(isinstance(block, type(blocks[0])) for block in blocks)
    )


def _copy_with_regions(module: torch.nn.Module, arguments: dict[str, Any]) -> torch.nn.Module:
    copied = type(module).__new__(type(module))
    vars(copied).update(vars(module))
    for name, value in vars(module).items():
        # methods that are bound to the module would run its uncompiled submodules
        if isinstance(value, MethodType) and value.__self__ is module:
            vars(copied)[name] = MethodType(value.__func__, copied)
        elif hasattr(value, "rebind"):
            vars(copied)[name] = value.rebind(module, copied)
    vars(copied)["_modules"] = {
        name: None if child is None else compile_regions(child, **arguments)
        for name, child in module._modules.items()
    }
    vars(copied)["_orig_mod"] = module
    return copied
