"""The gathers of a process group: over gloo, and small ones over sockets between the ranks of one machine."""

from __future__ import annotations

import contextlib
import threading
import weakref
from functools import cache
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, default_pg_timeout

from ..interrupts import delay_interrupt
from . import local_sockets
from .local_sockets import OVER_GROUP, LocalSockets

BEFORE_SOCKETS: Final = 31
"""Gathers by gloo before ranks of one machine connect for small ones; fewer are not worth it."""

_of_groups: weakref.WeakKeyDictionary[Any, Gathers] = weakref.WeakKeyDictionary()
"""By process group, whose objects take no attributes: what ranks have in common ends with the group, and not before."""
_making = threading.Lock()


def gathers_of(group: Any) -> Gathers:
    """Return the gathers of a process group, always the same object.

    Args:
        group: the group.
    """
    with _making:  # a group counts its gathers once, whichever thread asks
        found = _of_groups.get(group)
        if found is None:
            found = _of_groups[group] = Gathers(group)
        return found


class Gathers:
    """Gathers tensors over a process group.

    Which way a gather goes is the same on all ranks, whatever happens on one of them: it follows from the number of
    gathers that the group has begun, which the group's own count tells, and from what the ranks tell each other. A
    gather that an exception has ended on this rank alone is brought to its end by the next one, as gloo does it.

    Args:
        group: the process group; it is not kept, because gloo's threads abort a process in which it exists at the end.

    Attributes:
        num_begun: gathers over the group that count, those before ranks connect.
        sockets: those to the other ranks, None before and without them.
    """

    def __init__(self, group: Any) -> None:
        self._rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)
        self._name = "all_gather_single" if hasattr(group, "all_gather_single") else "_allgather_base"
        self._options = AllgatherOptions()
        self._options.asyncOp = False
        # only what all ranks know alike decides whether they try to connect
        self._may_connect = (
            group is dist.group.WORLD
            and 1 < self._world_size <= local_sockets.MAX_RANKS
            and dist.get_backend(group) == "gloo"
        )
        self._lock = threading.RLock()
        self._is_busy = False
        self.num_begun = 0
        self.sockets: LocalSockets | None = None

    def gather(self, group: Any, own: torch.Tensor, gathered: torch.Tensor) -> None:
        """Write the tensors of all ranks one after the other.

        Args:
            group: the process group.
            own: this rank's tensor, contiguous.
            gathered: what to write to.

        Raises:
            RuntimeError: a rank has gone, has not come in time, or has passed another size; or this thread is within a
                gather, and a signal has come.
        """
        if self.sockets is None and not self._may_connect:
            work = getattr(group, self._name)(gathered, own, self._options)
            if work is not None:
                work.wait()
            return
        with self._lock:
            if self._is_busy:
                raise RuntimeError(
                    "a gather began while this thread waits in another one, such as in a signal handler: the other "
                    "ranks do not wait for it; let the handler set a flag, and gather when the first one has returned"
                )
            try:
                self._is_busy = True
                if self._may_connect and self.num_begun >= BEFORE_SOCKETS:
                    self._connect(group)
                if self.sockets is None:
                    work = self._begin(group, own, gathered)
                else:
                    work = self._exchange(self.sockets, group, own, gathered)
            finally:
                self._is_busy = False
        if work is not None:
            work.wait()

    def connect_soon(self) -> None:
        """Let the ranks connect at their next gather, if they may; all of them call this between the same two."""
        self.num_begun = max(self.num_begun, BEFORE_SOCKETS)

    def count(self) -> dict[str, int]:
        """Return what decides which way the next gather goes; ranks where it differs would wait for each other."""
        sockets = self.sockets
        if sockets is None:
            return {"gathers": self.num_begun, "sockets": 0, "gathers over sockets": 0}
        # broken ones differ on all ranks: only a new group has others
        way = -1 - self._rank if sockets.broken else 1
        return {"gathers": self.num_begun, "sockets": way, "gathers over sockets": sockets.num_exchanges}

    def close(self) -> None:
        """Close the sockets: the process group ends."""
        self._may_connect = False
        if self.sockets is not None:
            self.sockets.close()

    def shut_down(self) -> None:
        """End the gather over sockets in which a thread waits; gathers raise from then on."""
        if self.sockets is not None:
            self.sockets.shut_down()

    def _exchange(self, sockets: LocalSockets, group: Any, own: torch.Tensor, gathered: torch.Tensor) -> Any:
        """Gather over sockets; return the work of the process group where the ranks agree that it has to gather."""
        if sockets.pending is not None:
            sockets.refuse_if_forked()
            self._end_pending(sockets, group)
        if sockets.pending is not None:  # the other ranks may wait there for this one
            return self._begin(group, own, gathered)
        plain = _plain_keys()
        if _is_plain(own, plain) and _is_plain(gathered, plain):
            stated, here, there = own.nbytes, own.data_ptr(), gathered.data_ptr()
        else:
            stated, here, there = OVER_GROUP, 0, 0
        if sockets.exchange(here, stated, there, (own, gathered)):
            return None
        return self._begin(group, own, gathered)

    def _end_pending(self, sockets: LocalSockets, group: Any) -> None:
        """End a gather that an exception has ended on this rank only; it stays pending if the group refuses it."""
        assert sockets.pending is not None
        own, gathered = sockets.pending.kept
        # what is raised here would have ended that gather
        with contextlib.suppress(Exception):
            if not sockets.pending.has_failed and not sockets.finish():
                work = self._begin(group, own, gathered)
                if work is not None:
                    work.wait()

    def _begin(self, group: Any, own: torch.Tensor, gathered: torch.Tensor) -> Any:
        """Let the process group begin a gather, and note that it has, also where an interrupt comes then."""
        before = _count(group)
        has_begun = False
        try:
            # the group's own method: dist.all_gather_into_tensor adds a third to the time of a small message
            work = getattr(group, self._name)(gathered, own, self._options)
            has_begun = before is None
        except Exception:
            if self.sockets is not None and self.sockets.pending is not None:
                self.sockets.pending.has_failed = True
            raise
        finally:
            if has_begun or _count(group) != before:
                self.num_begun += self._may_connect
                if self.sockets is not None:
                    self.sockets.settle()
        return work

    def _connect(self, group: Any) -> None:
        """Get sockets on all ranks, or on none of them.

        No exception ends that on one rank: like gloo's waits, it lasts until all ranks have come.
        """
        has_ended = threading.Event()
        errors: list[BaseException] = []

        def connect() -> None:
            try:
                options = getattr(group._get_backend(torch.device("cpu")), "options", None)
                timeout = getattr(options, "_timeout", None) or default_pg_timeout
                self.sockets = local_sockets.connect(
                    self._rank,
                    self._world_size,
                    lambda obj: _gather_objects(group, obj),
                    timeout.total_seconds(),
                    # torch compares collectives then
                    willing=dist.get_debug_level() != dist.DebugLevel.DETAIL,
                )
                self._may_connect = False
            except BaseException as error:
                errors.append(error)
            finally:
                has_ended.set()

        raised: list[BaseException] = []  # by handlers of the user's
        thread = threading.Thread(target=connect, name="notebook_accel connects ranks", daemon=True)
        with delay_interrupt():
            try:
                thread.start()
            except BaseException as error:
                if (
                    isinstance(error, RuntimeError) and not thread.is_alive()
                ):  # the system has no more threads
                    connect()
                else:
                    raised.append(error)
            while not has_ended.is_set():
                try:
                    has_ended.wait()
                except BaseException as error:
                    raised.append(error)
        for first in (*errors, *raised):
            raise first


@cache
def _plain_keys() -> frozenset[int]:
    """Return what torch dispatches by for tensors that are nothing but numbers in memory of the CPU."""
    tensor = torch.Tensor()
    with torch.inference_mode():
        inferred = torch.Tensor()
    return frozenset(torch._C._dispatch_keys(made).raw_repr() for made in (tensor, inferred))


def _is_plain(tensor: torch.Tensor, plain: frozenset[int]) -> bool:
    """Return whether the memory at the tensor's address is that of its numbers."""
    return (
        (type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter)
        and torch._C._dispatch_keys(tensor).raw_repr() in plain
        and (tensor.data_ptr() != 0 or tensor.nbytes == 0)
    )


def _count(group: Any) -> int | None:
    """Return how many collectives of CPU tensors a group has begun; None where its backend does not count."""
    try:
        return int(group._get_backend(torch.device("cpu"))._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):
        return None


def _gather_objects(group: Any, obj: Any) -> list[Any]:
    """Return every rank's object."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, obj, group=group)
    return gathered
