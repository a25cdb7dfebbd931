"""Frees device memory, and finds the batch size that fits into it."""

from __future__ import annotations

import functools
import gc
import inspect
import traceback
from collections.abc import Callable
from typing import Any, Final

import torch

from . import devices

_OUT_OF_MEMORY: Final = (
    "out of memory",  # CUDA, HIP, XPU and MPS
    "DefaultCPUAllocator: can't allocate memory",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",  # what cuDNN says where no algorithm's workspace fits
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Return the cached memory of all devices in use to the system; no device is initialised.

    Args:
        garbage_collection: collect dead Python objects first, which takes longer.
    """
    if garbage_collection:
        gc.collect()
    for kind in devices.list_initialized():
        devices.empty_cache(torch.device(kind))


def release_memory(*objects: Any) -> list[None]:
    """Free device memory: `model, batch = release_memory(model, batch)`.

    The memory of the objects themselves becomes free when the caller assigns the result to their names. The next call
    of this function, or of `clear_device_cache`, returns that memory to the system.

    Args:
        objects: what the caller no longer needs.

    Returns:
        A None for each object.
    """
    released: list[None] = [None for _ in objects]
    del objects
    clear_device_cache(garbage_collection=True)
    return released


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Return True if an exception says that the memory of a device or of the CPU ran out.

    Args:
        exception: what a step of training raised.
    """
    if isinstance(exception, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(exception)
    return isinstance(exception, RuntimeError) and any(sign in text for sign in _OUT_OF_MEMORY)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Decorate a function so that it runs with the largest batch size that fits into memory.

    The function gets the batch size before its other arguments. Each time memory runs out, the memory of the failed
    call is freed and the function is called with a smaller size. A later call starts with the size that worked. Each
    process decides for itself: where processes wait for each other, memory must run out in all of them.

    Args:
        function: takes the batch size as its first argument, which callers leave out.
        starting_batch_size: the first size to try.
        reduce_batch_size_fn: returns the next size to try; by default nine tenths of the last, rounded down.

    Returns:
        The decorated function; a decorator where `function` is None.

    Raises:
        TypeError: the arguments of a call do not fit the function, as when the batch size was passed too.
        RuntimeError: no batch size was small enough; the cause is the last failure.
        ValueError: `starting_batch_size` is negative, or `reduce_batch_size_fn` returned no smaller size.
    """
    if isinstance(starting_batch_size, bool) or not isinstance(starting_batch_size, int):
        raise TypeError(f"starting_batch_size is an int, not {starting_batch_size!r}")
    if starting_batch_size < 0:
        raise ValueError(f"starting_batch_size {starting_batch_size} is negative")
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    if not callable(function):
        raise TypeError(f"find_executable_batch_size decorates a function, not {function!r}")
    return _Search(function, starting_batch_size, reduce_batch_size_fn)


class _Search:
    """The decorated function; its signature is that of the function without the batch size."""

    def __init__(self, function: Callable[..., Any], start: int, reduce: Callable[[], int] | None) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._start = start
        self._reduce = reduce
        own = inspect.signature(function)
        parameters = list(own.parameters.values())
        self._takes_batch_size = bool(parameters) and parameters[0].kind is not inspect.Parameter.KEYWORD_ONLY
        if not self._takes_batch_size:
            raise TypeError(f"{_name(function)}{own} must take the batch size as its first argument")
        if parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
            own = own.replace(parameters=parameters[1:])
        self.__signature__ = own

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        raise TypeError(
            f"{_name(self._function)} is a method: decorate a function, the batch size has to be its first argument"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._check(args, kwargs)
        batch_size, tried = self._start, list[int]()
        last: Exception | None = None
        clear_device_cache(garbage_collection=True)
        while batch_size > 0:
            tried.append(batch_size)
            try:
                result = self._function(batch_size, *args, **kwargs)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
                last = error
            else:
                self._start = batch_size
                return result
            _forget_frames(last)
            clear_device_cache(garbage_collection=True)
            batch_size = self._next(batch_size)
        sizes = ", ".join(map(str, tried)) if tried else "none, because starting_batch_size is 0"
        raise RuntimeError(
            f"{_name(self._function)} found no batch size that fits into memory; tried: {sizes}"
        ) from last

    def _next(self, batch_size: int) -> int:
        if self._reduce is None:
            return batch_size * 9 // 10
        reduced = self._reduce()
        if isinstance(reduced, bool) or not isinstance(reduced, int) or reduced >= batch_size:
            raise ValueError(
                f"reduce_batch_size_fn returned {reduced!r} after batch size {batch_size}: "
                "it must return a smaller int"
            )
        return reduced

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        signature: inspect.Signature = self.__signature__
        name = _name(self._function)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            hint = ""
            try:
                rest = signature.bind(*args[1:], **kwargs) if args else None
            except TypeError:
                rest = None
            if rest is not None:
                call = ", ".join(f"{key}={value!r}" for key, value in rest.arguments.items())
                hint = f"; find_executable_batch_size passes the batch size itself, so call {name}({call})"
            raise TypeError(f"{name}{signature} cannot be called like this: {error}{hint}") from None


def _forget_frames(error: BaseException | None) -> None:
    """Drop the local variables that the tracebacks of an error and of its causes keep alive."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", None) or type(function).__name__)
