"""Makes gloo's collectives complete in the order in which they were issued, as DeepSpeed expects."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

_GATHERS: Final = ("all_gather", "all_gather_into_tensor")


class OrderedCollectives:
    """The asynchronous collectives of this process; waiting for one also waits for all earlier ones.

    A stream does this on a GPU. gloo uses several threads, and DeepSpeed (0.19, `AllGatherCoalescedHandle` and
    `_allgather_params_coalesced`) gathers several parameters at once and waits for the last one only.
    """

    def __init__(self) -> None:
        self._pending: list[Any] = []

    def wrap(self, gather: Callable[..., Any]) -> Callable[..., Any]:
        """Return the collective as a function whose works wait for the earlier ones.

        Args:
            gather: a collective of torch.distributed that returns a `Work`, or None when it is not asynchronous.
        """

        @functools.wraps(gather)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            work = gather(*args, **kwargs)
            if work is None:  # a synchronous call
                return None
            self._pending = [*(earlier for earlier in self._pending if not earlier.is_completed()), work]
            return _OrderedWork(work, list(self._pending))

        return wrapper


class _OrderedWork:
    """A collective in progress.

    Args:
        work: of the collective itself.
        works: of all collectives that have to end, `work` included.
    """

    def __init__(self, work: Any, works: list[Any]) -> None:
        self._work = work
        self._works = works

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def is_completed(self) -> bool:
        """Return whether this collective and all earlier ones have ended."""
        return all(work.is_completed() for work in self._works)

    def wait(self, *args: Any) -> Any:
        """Wait for this collective and all earlier ones."""
        for work in self._works:
            work.wait(*args)
        return True


def order_gathers(backend: Any) -> None:
    """Make the gathers of DeepSpeed's backend complete in order; a second call changes nothing.

    Args:
        backend: `deepspeed.comm.comm.cdb`; its functions are replaced.
    """
    if getattr(backend, "_notebook_accel_in_order", False):
        return
    order = OrderedCollectives()
    for name in _GATHERS:
        setattr(backend, name, order.wrap(getattr(backend, name)))
    backend._notebook_accel_in_order = True
