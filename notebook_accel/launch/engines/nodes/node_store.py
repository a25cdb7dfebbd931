"""A store that another node may hold: that it is gone is raised, in a line, and not printed.

Torch's store prints a warning besides, with all frames of its C++ code. A kernel shows that in the cell.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.distributed import DistError, DistNetworkError, Store

_WARNINGS: Final = 1  # torch's levels: what it prints unless TORCH_CPP_LOG_LEVEL says more or less
_ERRORS: Final = 2


class NodeStore:
    """A store as torch's, whose errors have one line. Once its connection is lost, each call fails at once.

    Args:
        store: what it stands for; has all methods. Torch lets one thread at a time use it, too.

    Attributes:
        inner: the store that it stands for, for code that needs one of torch's.
    """

    def __init__(self, store: Store) -> None:
        self.inner = store
        self._lock = threading.Lock()
        self._loss = ""

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        return functools.partial(self._call, found) if callable(found) else found

    def _call(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a method of the store; DistError with one line where that fails."""
        with self._lock:
            if self._loss:
                raise DistNetworkError(self._loss)
            try:
                with keep_quiet():
                    return method(*args, **options)
            except DistError as error:
                line = str(error).partition("\n")[0]
                if isinstance(error, DistNetworkError):
                    self._loss = line or "the connection is lost"
                raise type(error)(line) from None


@contextlib.contextmanager
def keep_quiet() -> Iterator[None]:
    """Let torch's C++ code print no warnings meanwhile, unless the user chose what it prints."""
    level = _find_level()
    if level is None or level.value != _WARNINGS:
        yield
        return
    level.value = _ERRORS
    try:
        yield
    finally:
        level.value = _WARNINGS


@functools.cache
def _find_level() -> ctypes.c_int | None:
    """Return the level from which on torch's C++ code prints; None where torch does not show it."""
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(torch._C.__file__), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None
