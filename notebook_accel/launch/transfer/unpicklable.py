"""Which object inside another one cannot be pickled, and the path that leads to it."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ... import interrupts
from ...errors import ShipError
from ...events import Result
from .pickled import Pickled
from .pickling import Names, pack, unpack

_MAX_DEPTH = 12
_DATA_PARALLEL = b"torch.nn.parallel.distributed"
"""The module of the class that `prepare` wraps models in, as a pickle names it; it needs a process group."""
_STAYS = ("launch.run.Run", "session.core.Session")
"""What belongs to the process that made it: classes of this package, by names that need no import."""


def pack_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str
) -> Pickled:
    """Pickle a call of a session.

    Args:
        function: what to call.
        args: its arguments.
        kwargs: its arguments by name.
        name: the function's, for the message.

    Returns:
        The pickled tuple of function, args, kwargs and what `Names` becomes.

    Raises:
        ShipError: as `pack_job`.
    """
    try:
        return pack((function, args, kwargs, Names()))
    except Exception:
        pack_job(functools.partial(function, **kwargs) if kwargs else function, args, name)
        raise


def pack_job(function: Any, args: tuple[Any, ...], name: str, *, share: bool = False) -> Pickled:
    """Pickle a function and its arguments.

    Args:
        function: what is launched.
        args: its arguments.
        name: the function's, for the message.
        share: as of `pack`.

    Returns:
        The pickled tuple of function, args and what `Names` becomes.

    Raises:
        ShipError: the message names the object that cannot be pickled and the path that leads to it.
    """
    try:
        with interrupts.allow_interrupt():  # it may take long, and nothing has started
            return pack((function, args, Names()), share=share)
    except Exception as error:
        path, part, reason = _find_part(name, function, error, 0, set())
        if part is function:
            for index, arg in enumerate(args):
                if (problem := _try_to_pickle(arg)) is not None:
                    path, part, reason = _find_part(f"args[{index}]", arg, problem, 0, set())
                    break
        raise ShipError(
            f"{path} cannot be sent to the worker processes: {_name_type(part)} "
            f"object does not pickle ({reason}). Make it inside the function that is launched, or pass what it "
            "is made from."
        ) from None


def pack_value(value: Any) -> Pickled:
    """Pickle a value that a function returned; its tensors arrive on the CPU.

    Raises:
        ShipError: the message names the object that cannot be pickled and the path that leads to it.
    """
    try:
        return pack(value, to_cpu=True)
    except Exception as error:
        path, part, reason = _find_part("the returned value", value, error, 0, set())
        raise ShipError(
            f"{path} cannot be sent to the notebook: {_name_type(part)} object does not pickle ({reason}). "
            "Return what can be pickled: numbers, tensors, state dicts, or nothing."
        ) from None


def unpack_value(result: Result) -> Any:
    """Make a returned value again.

    Raises:
        ShipError: it cannot be made from its pickle, as with a class whose `__init__` takes other arguments.
    """
    try:
        return unpack(result.value, list(result.buffers))
    except Exception as error:
        text = f"the value that rank {result.rank} returned cannot be made again in the notebook"
        if _DATA_PARALLEL in result.value:
            text += ", with a model that belongs to its processes: return accelerator.unwrap_model(model)"
        raise ShipError(f"{text}: {type(error).__name__}: {error}") from error


def _name_type(obj: Any) -> str:
    cls = type(obj)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _find_part(
    path: str, obj: Any, error: Exception, depth: int, seen: set[int]
) -> tuple[str, Any, Exception]:
    """Return path, object and error of the deepest part that fails to pickle."""
    seen.add(id(obj))
    if _name_type(obj).partition(".")[2] in _STAYS:
        return (
            path,
            obj,
            TypeError("it belongs to the process that made it; give the function what it needs of it"),
        )
    # what multiprocessing says of a lock or queue tells more than that some part of it does not pickle
    if depth < _MAX_DEPTH and not _name_type(obj).startswith("multiprocessing."):
        for step, child in _list_children(obj):
            if id(child) in seen:
                continue
            problem = _try_to_pickle(child)
            if problem is not None:
                return _find_part(f"{path} -> {step}", child, problem, depth + 1, seen)
    return path, obj, error


def _try_to_pickle(obj: Any) -> Exception | None:
    try:
        pack(obj)
    except Exception as error:
        return error
    return None


def _list_children(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield what pickling an object would follow: name and value."""
    if isinstance(obj, types.FunctionType):
        yield from _list_function_children(obj)
    elif isinstance(obj, types.MethodType):
        yield "its object", obj.__self__
        yield "its function", obj.__func__
    elif isinstance(obj, functools.partial):
        yield "its function", obj.func
        yield from ((f"argument {index}", value) for index, value in enumerate(obj.args))
        yield from ((f"argument {key}", value) for key, value in obj.keywords.items())
    elif isinstance(obj, Mapping):
        yield from ((f"[{key!r}]", value) for key, value in obj.items())
    elif isinstance(obj, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", value) for index, value in enumerate(obj))
    elif isinstance(obj, type):
        yield from ((f"class attribute {key}", value) for key, value in vars(obj).items())
    else:
        yield from ((f"attribute {key}", value) for key, value in getattr(obj, "__dict__", {}).items())
        for cls in type(obj).__mro__:
            for key in getattr(cls, "__slots__", ()):
                if hasattr(obj, key):
                    yield f"attribute {key}", getattr(obj, key)
        if isinstance(type(obj), type) and type(obj).__module__ == "__main__":
            yield f"class {type(obj).__qualname__}", type(obj)


def _list_function_children(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"closure variable {name}", cell.cell_contents
        except ValueError:
            continue  # not bound yet
    for name in sorted(_list_global_names(function.__code__)):
        if name in function.__globals__:
            yield f"global {name}", function.__globals__[name]
    for index, value in enumerate(function.__defaults__ or ()):
        yield f"default {index}", value
    for name, value in (function.__kwdefaults__ or {}).items():
        yield f"default {name}", value
    yield from ((f"attribute {key}", value) for key, value in function.__dict__.items())


def _list_global_names(code: types.CodeType) -> set[str]:
    names = {step.argval for step in dis.get_instructions(code) if step.opname.endswith("_GLOBAL")}
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names |= _list_global_names(const)
    return names
