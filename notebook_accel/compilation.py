"""torch.compile around prepared models: what to compile and how, whole models or their repeated blocks alone."""

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
    """What turns captured graphs into code; NO compiles nothing."""

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
    """Arguments of `torch.compile` for every model that is prepared; what is None comes from ACCELERATE_DYNAMO_*.

    Attributes:
        backend: by default NO, which compiles nothing; words count in any case.
        mode: `default`, `reduce-overhead`, `max-autotune` or what else torch knows.
        fullgraph: raise where the model is no single graph.
        dynamic: True for kernels of any shape, False for one shape each, None to let torch find out.
        options: for the backend; ValueError beside a `mode`.
        disable: wrap the model but compile nothing.
        use_regional_compilation: compile each block of a `ModuleList` of equal blocks by itself, which takes a
            fraction of the time because they share their code.
    """

    backend: DynamoBackend | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
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
        if self.dynamic is None and environ.get("ACCELERATE_DYNAMO_USE_DYNAMIC"):
            self.dynamic = environ.flag("ACCELERATE_DYNAMO_USE_DYNAMIC")
        if self.use_regional_compilation is None:
            self.use_regional_compilation = environ.flag("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION")

    @property
    def is_active(self) -> bool:
        """True if models are to be compiled."""
        return self.backend is not DynamoBackend.NO

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of all fields, the backend as torch spells it."""
        return {**super().to_dict(), "backend": str(self.backend).lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments for `torch.compile` that are not torch's own defaults."""
        plain = {"backend": "no", "mode": "default", "fullgraph": False, "dynamic": None, "options": None}
        plain["disable"] = False
        given = self.to_dict()
        return {name: given[name] for name, default in plain.items() if given[name] != default}


def choose(backend: Any, plugin: TorchDynamoPlugin | None, inherited: Any = None) -> TorchDynamoPlugin:
    """Return what an accelerator compiles with: its arguments, else `inherited`, else what the environment says.

    ValueError if both arguments are given or the backend is unknown, TypeError for another kind of plugin.
    """
    if plugin is not None:
        if backend is not None:
            raise ValueError("dynamo_backend and dynamo_plugin were both given: set backend in the latter")
        if not isinstance(plugin, TorchDynamoPlugin):
            raise TypeError(f"dynamo_plugin must be a TorchDynamoPlugin, not {plugin!r}")
        return plugin
    if backend is None and isinstance(inherited, TorchDynamoPlugin):
        return inherited
    return TorchDynamoPlugin(backend=backend)


def compile_model(model: torch.nn.Module, plugin: TorchDynamoPlugin) -> torch.nn.Module:
    """Return the model compiled as the plugin says; one that is compiled already as it is."""
    if not plugin.is_active or is_compiled_module(model) or "_orig_mod" in vars(model):
        return model
    if plugin.use_regional_compilation:
        return compile_regions(model, **plugin.to_kwargs())
    return _compiled(model, plugin.to_kwargs())


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Return True if this is what `torch.compile` made of a module."""
    # where nobody imported torch's compiler, which takes a second, nothing can be compiled
    frames = sys.modules.get("torch._dynamo.eval_frame")
    kind = getattr(frames, "OptimizedModule", None)
    return kind is not None and isinstance(module, kind)


def has_compiled_regions(module: torch.nn.Module) -> bool:
    """Return True if the module or a part of it was compiled."""
    return any(is_compiled_module(part) for part in module.modules())


def original(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return what a module was compiled from, as a whole or in regions; None if it was not."""
    if is_compiled_module(module):
        inner: torch.nn.Module = module._orig_mod  # type: ignore[assignment]
        return inner
    found: torch.nn.Module | None = vars(module).get("_orig_mod")
    return found


def recompiled(compiled: Any, inner: torch.nn.Module) -> torch.nn.Module:
    """Return `inner` compiled in the way that `compiled` is."""
    made: torch.nn.Module = type(compiled)(inner, compiled.dynamo_ctx)
    return made


def compile_regions(module: torch.nn.Module, **compile_kwargs: Any) -> torch.nn.Module:
    """Return a module whose repeated blocks are compiled one by one, over the same parameters and buffers.

    A `ModuleList` of blocks of one class is compiled block by block, what holds none as a whole. The module that is
    passed stays as it is and hangs on the result as `_orig_mod`.
    """
    if _is_repeated(module):
        blocks = torch.nn.ModuleList([_compiled(block, compile_kwargs) for block in module.children()])
        vars(blocks)["_orig_mod"] = module
        return blocks
    if any(_is_repeated(part) for part in module.modules()):
        return _copied_with_regions(module, compile_kwargs)
    return _compiled(module, compile_kwargs)


def _compiled(module: torch.nn.Module, arguments: dict[str, Any]) -> torch.nn.Module:
    if is_compiled_module(module):
        return module
    compiled: Any = torch.compile(module, **arguments)
    made: torch.nn.Module = compiled
    return made


def _is_repeated(module: torch.nn.Module) -> bool:
    blocks = list(module.children())
    return (
        isinstance(module, torch.nn.ModuleList)
        and bool(blocks)
        and all(isinstance(block, type(blocks[0])) for block in blocks)
    )


def _copied_with_regions(module: torch.nn.Module, arguments: dict[str, Any]) -> torch.nn.Module:
    copied = type(module).__new__(type(module))
    vars(copied).update(vars(module))
    for name, value in vars(module).items():
        # what is bound to the module would run its uncompiled parts
        if isinstance(value, MethodType) and value.__self__ is module:
            vars(copied)[name] = MethodType(value.__func__, copied)
        elif hasattr(value, "rebound"):
            vars(copied)[name] = value.rebound(module, copied)
    vars(copied)["_modules"] = {
        name: None if child is None else compile_regions(child, **arguments)
        for name, child in module._modules.items()
    }
    vars(copied)["_orig_mod"] = module
    return copied
