"""Imports torch's compiler once in the kernel, so that forked workers need not import it.

The first optimizer or DistributedDataParallel of a process imports `torch._dynamo`. This takes over a second of one
core, and every launch has new workers. A worker that is forked from a process with `torch._dynamo` already has it. The
import starts no thread, touches no device and changes no signal handler, so this process can be forked after it.

The import happens right before the workers start, unless a kernel had time for it before (`agent.background`), and
only for a function that trains. Without it each worker would spend the same time, so the first launch is not slower,
and it is faster if workers share cores. The code of the function says whether it trains. Other ways are worse:

- If a worker reported that it needs the compiler, the second launch would still pay for the import.
- If a thread did the import, it might hold a lock during a fork.
- If every launch did the import, functions that do not train would wait for it.

If the code does not show that the function trains, each worker imports the compiler itself. Some environment variables,
such as TORCH_COMPILE_DISABLE, are read during the import. They have to be set before the launch, not in the function.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import sysconfig
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch

from ... import collector, environ, interrupts

MODULE: Final = "torch._dynamo"
_TRAINING_NAMES: Final = {"optim", "torch.optim", "backward"}
_OTHER_NAMES: Final = {"prepare", "DistributedDataParallel", "use_deterministic_algorithms"}
"""Of what imports the compiler besides: wrapped models that are only evaluated, and a setting of it."""
_PACKAGE_FOLDERS: Final = {"site-packages", "dist-packages"}
_OTHER_FOLDERS: Final = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[2]))


def is_loaded() -> bool:
    """Return whether this process has imported torch's compiler."""
    return MODULE in sys.modules


def load_for(function: Any) -> bool:
    """Import torch's compiler, if a function needs it and this process does not have it yet; see `load`.

    Args:
        function: what the workers will run.

    Returns:
        Whether the import was tried.
    """
    if is_loaded() or not is_needed_by(function):
        return False
    load()
    return True


def load() -> None:
    """Import torch's compiler.

    The environment variables do not change. An interrupt is delayed to the end of the import, because Python could not
    repeat half an import. If the import fails, nothing is raised here: the worker that needs the compiler will fail.
    """
    with interrupts.delay_interrupt():
        saved = environ.snapshot()
        with contextlib.suppress(Exception), collector.pause():
            importlib.import_module(MODULE)
        environ.restore(saved)  # the import sets a cache folder; a compilation sets it again


class TrainingWatch:
    """Looks whether the functions of a notebook train, at each of them once."""

    def __init__(self) -> None:
        self._seen: weakref.WeakSet[FunctionType] = weakref.WeakSet()

    def look(self, values: Iterable[Any]) -> bool:
        """Return whether there is a function among the values that trains and was not there before.

        Args:
            values: of the notebook's variables.
        """
        functions = [value for value in values if isinstance(value, FunctionType)]
        own = [function for function in functions if not is_installed(function.__module__)]
        new = [function for function in own if function not in self._seen]
        self._seen.update(new)
        return any(map(is_needed_by, new))


def is_needed_by(function: Any) -> bool:
    """Return whether a function trains, or does something else that imports the compiler.

    It trains if an optimizer or `backward` is named in its code, or in user code that it refers to. Code of installed
    packages does not count, because most of them mention optimizers somewhere. If the function itself is from an
    installed package, its own module does count.

    Args:
        function: any callable. No code of it is run.
    """
    root = _unwrap(function)
    waiting: list[FunctionType | type] = [root]
    seen: set[int] = set()
    while waiting:
        part = waiting.pop()
        if isinstance(part, type) and issubclass(part, torch.optim.Optimizer):
            return True
        if id(part) in seen or (part.__module__ != root.__module__ and is_installed(part.__module__)):
            continue
        seen.add(id(part))
        if isinstance(part, type):
            waiting += [*part.__mro__, *map(_unwrap, vars(part).values())]
            continue
        names = set(_list_names(part.__code__))
        if names & (_TRAINING_NAMES | _OTHER_NAMES) or names >= {"torch", "compile"}:
            return True
        waiting += map(_unwrap, [*_list_values(names, part.__globals__), *_list_closure(part)])
    return False


def is_installed(module: str) -> bool:
    """Return whether a module is part of Python, of an installed package or of this package.

    Args:
        module: its name.
    """
    origin = getattr(getattr(sys.modules.get(module), "__spec__", None), "origin", None)
    if origin is None:
        return False  # a notebook's own module has no file
    place = Path(origin)  # "built-in" and "frozen" are not absolute paths
    if not place.is_absolute():
        return True
    return bool(_PACKAGE_FOLDERS & set(place.parts)) or origin.startswith(_OTHER_FOLDERS)


def _list_values(names: Collection[str], scope: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the values that names have in a scope, and the values that they have in user modules of that scope."""
    for value in [scope[name] for name in names if name in scope]:
        if not issubclass(type(value), ModuleType):
            yield value
        elif not is_installed(vars(value).get("__name__", "")):
            yield from (vars(value)[name] for name in names if name in vars(value))


def _unwrap(value: Any) -> FunctionType | type:
    """Return the function inside a partial or method; for any other object its class. Runs no code of the object."""
    while issubclass(type(value), functools.partial):
        value = value.func
    if issubclass(type(value), (MethodType, staticmethod, classmethod)):
        value = value.__func__
    return value if issubclass(type(value), (FunctionType, type)) else type(value)


def _list_names(code: CodeType) -> Iterator[str]:
    """Yield the names of globals, attributes and modules that code uses, and that functions inside it use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _list_names(constant)


def _list_closure(function: FunctionType) -> Iterator[Any]:
    """Yield the values of the variables that a function uses from enclosing functions."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not assigned yet
            yield cell.cell_contents
