"""The import of torch's compiler, which every optimizer needs: once in a kernel instead of once in every worker.

The first optimizer or DistributedDataParallel of a process imports `torch._dynamo`: over a second of one core, and
workers are new processes at each launch. A worker that is forked from a process that has it does not import it again.
The import starts no thread, touches no device and changes no signal handler, so this process can be forked after it.

A function that trains causes it, right before its workers start: they would spend that time on it themselves, so the
first launch takes no longer than it did, and less where workers share cores. Whether a function trains is read from its
code, since nothing else is known that early: to wait until a worker tells would leave the second launch to pay again,
a thread that imports may hold a lock at a fork, and other functions are not to wait. A worker whose need is not seen
imports it itself. Environment variables that are read at the import, TORCH_COMPILE_DISABLE for example, have to be set
before the launch: in the function it is too late.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch

from .. import environ
from . import signals

MODULE: Final = "torch._dynamo"
_MARKS: Final = {"optim", "torch.optim", "backward"}
_PACKAGES: Final = {"site-packages", "dist-packages"}  # also the user's own and the system's
_OTHERS: Final = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]))


def is_loaded() -> bool:
    """Whether this process has torch's compiler."""
    return MODULE in sys.modules


def load_for(function: Any) -> bool:
    """Import torch's compiler where a function needs it and it is not there yet; return whether this was so.

    The environment stays as it is. An interrupt waits for the end: a half of it could not be imported again. Where it
    cannot be imported at all, the worker that needs it says why.
    """
    if is_loaded() or not needed_by(function):
        return False
    with signals.interrupt_held():
        saved = environ.snapshot()
        with contextlib.suppress(Exception):
            importlib.import_module(MODULE)
        environ.restore(saved)  # it sets a folder for what it compiles, which is set again when it compiles
    return True


def needed_by(function: Any) -> bool:
    """Whether a function names an optimizer or `backward`, or what it names of the user's own code does.

    Of installed packages only the module of the function itself is looked into: most name optimizers somewhere.
    """
    root = _plain(function)
    waiting: list[FunctionType | type] = [root]
    seen: set[int] = set()
    while waiting:
        part = waiting.pop()
        if isinstance(part, type) and issubclass(part, torch.optim.Optimizer):
            return True
        if id(part) in seen or (part.__module__ != root.__module__ and _is_installed(part.__module__)):
            continue
        seen.add(id(part))
        if isinstance(part, type):
            waiting += [*part.__mro__, *map(_plain, vars(part).values())]
            continue
        names = set(_names(part.__code__))
        if names & _MARKS:
            return True
        waiting += map(_plain, [*_named(names, part.__globals__), *_enclosed(part)])
    return False


def _is_installed(module: str) -> bool:
    """Whether a module came with Python or a package, or is ours; a cell's has no file."""
    origin = getattr(getattr(sys.modules.get(module), "__spec__", None), "origin", None)
    if origin is None:
        return False
    place = Path(origin)  # "built-in" and "frozen" are none
    return not place.is_absolute() or bool(_PACKAGES & set(place.parts)) or origin.startswith(_OTHERS)


def _named(names: Collection[str], scope: Mapping[str, Any]) -> Iterator[Any]:
    """Yield what names stand for in a scope, and in the user's modules that are among it."""
    for value in [scope[name] for name in names if name in scope]:
        if not issubclass(type(value), ModuleType):
            yield value
        elif not _is_installed(vars(value).get("__name__", "")):
            yield from (vars(value)[name] for name in names if name in vars(value))


def _plain(value: Any) -> FunctionType | type:
    """Return the function behind a partial or method; of other objects the class. Runs no code of theirs."""
    while issubclass(type(value), functools.partial):
        value = value.func
    if issubclass(type(value), (MethodType, staticmethod, classmethod)):
        value = value.__func__
    return value if issubclass(type(value), (FunctionType, type)) else type(value)


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names of globals, attributes and modules that code uses, with the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _enclosed(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not assigned yet
            yield cell.cell_contents
