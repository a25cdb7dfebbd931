"""Collectives on CPUs that end in the order in which they began, as DeepSpeed takes for granted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

GATHERS: Final = ("all_gather", "all_gather_into_tensor")


class InOrder:
    """Asynchronous collectives of a process; to wait for one is to wait for all before it.

    On a GPU a stream sees to that. gloo has threads, and of several parameters that are gathered at once DeepSpeed
    (0.19, `AllGatherCoalescedHandle` and `_allgather_params_coalesced`) waits for the last one only.
    """

    def __init__(self) -> None:
        self._under_way: list[Any] = []

    def wrap(self, gather: Callable[..., Any]) -> Callable[..., Any]:
        """Return the collective with works that wait for those before them."""

        @functools.wraps(gather)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            work = gather(*args, **kwargs)
            if work is None:  # it was not asynchronous
                return None
            self._under_way = [*(one for one in self._under_way if not one.is_completed()), work]
            return _Work(work, list(self._under_way))

        return wrapper


class _Work:
    """A collective under way, with those that have to end before it."""

    def __init__(self, work: Any, until: list[Any]) -> None:
        self._work = work
        self._until = until

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def is_completed(self) -> bool:
        """Return whether it has ended, and all before it."""
        return all(work.is_completed() for work in self._until)

    def wait(self, *args: Any) -> Any:
        """Wait for it, and all before it."""
        for work in self._until:
            work.wait(*args)
        return True


def keep(backend: Any) -> None:
    """Let the gathers of DeepSpeed's backend (`deepspeed.comm`) end in order, once for each backend."""
    if getattr(backend, "_notebook_accel_in_order", False):
        return
    order = InOrder()
    for name in GATHERS:
        setattr(backend, name, order.wrap(getattr(backend, name)))
    backend._notebook_accel_in_order = True
