"""The import of torch's compiler, which every optimizer needs: once in a kernel instead of once in every worker.

The first optimizer or DistributedDataParallel of a process imports `torch._dynamo`: over a second of one core, and
workers are new processes at each launch. A worker that is forked from a process that has it does not import it again.
The import starts no thread, touches no device and changes no signal handler, so this process can be forked after it.

Only functions that train cause it, and only right before their workers start, when these would do nothing else: the
first launch takes no longer than it did, less where workers share cores. What a function needs is read from its code.
A worker that needs the compiler for another reason imports it itself. So the function is too late to set
environment variables that are read at that import (TORCH_COMPILE_DISABLE): they belong in a cell before the launch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, Final

import torch

from .. import environ
from . import signals

MODULE: Final = "torch._dynamo"
_MARKS: Final = {"optim", "torch.optim", "backward"}


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
    saved = environ.snapshot()
    with signals.interrupt_held(), contextlib.suppress(Exception):
        importlib.import_module(MODULE)
    environ.restore(saved)  # it sets a folder for what it compiles, which is set again when it compiles
    return True


def needed_by(function: Any) -> bool:
    """Whether a function names an optimizer or `backward`, or what it names of its own module does."""
    waiting, seen, home = [_plain(function)], set(), _plain(function).__module__
    while waiting:
        part = waiting.pop()
        if isinstance(part, type) and issubclass(part, torch.optim.Optimizer):
            return True
        if part in seen or part.__module__ != home:
            continue
        seen.add(part)
        if isinstance(part, type):
            waiting += map(_plain, vars(part).values())
            continue
        names = set(_names(part.__code__))
        if names & _MARKS:
            return True
        waiting += [_plain(part.__globals__[name]) for name in names if name in part.__globals__]
        waiting += map(_plain, _enclosed(part))
    return False


def _plain(value: Any) -> FunctionType | type:
    """Return the function behind a partial or method; of other objects the class."""
    while isinstance(value, functools.partial):
        value = value.func
    value = getattr(value, "__func__", value)
    return value if isinstance(value, (FunctionType, type)) else type(value)


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
