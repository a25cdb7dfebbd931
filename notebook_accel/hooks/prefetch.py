"""Weights of the modules that compute next, fetched while one computes.

A thread fetches them. On the CPU it would take the cores and the memory's bandwidth from the module that computes, so
there it fetches only what has to come from a disk.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from .. import devices
from . import staging
from .lease import ReentrantLease
from .offloaded_tensor import read_dtype_and_grad
from .staging import Staging
from .weights import check, get_many, is_near


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Need:
    """The weights that a module has to have before it computes.

    Attributes:
        weights: where they are.
        names: theirs.
        places: the stand-in of each meanwhile; a weight is cast to the dtype that its stand-in has then.
        device: where the module computes.
        nbytes: of all of them, on the device.
    """

    weights: Mapping[str, torch.Tensor]
    names: tuple[str, ...]
    places: tuple[torch.Tensor, ...]
    device: torch.device
    nbytes: int

    @torch.no_grad()
    def fetch(
        self, device: torch.device | None = None, way: Staging | None = None, *, beside: bool = False
    ) -> dict[str, torch.Tensor]:
        """Return the weights on the device, by name.

        Args:
            device: the device with its number, for a thread with another current device.
            way: to that device, if it has one.
            beside: whether a module computes meanwhile.
        """
        found = get_many(self.weights, self.names, aligned=way is None, beside=beside)
        send = way.send if way is not None else lambda tensor: tensor.to(device or self.device)
        return {
            name: send(_cast(found[name], read_dtype_and_grad(place)[0]))
            for name, place in zip(self.names, self.places, strict=True)
        }

    @property
    def is_near(self) -> bool:
        """Whether the module fetches the weights itself in no more time than a thread would take from another one."""
        return self.device.type == "cpu" and is_near(self.weights, self.names)

    def check(self) -> None:
        """Raise CheckpointError if what was fetched may have lost its values: its file has changed."""
        check(self.weights, self.names)


def _add_number(device: torch.device) -> torch.device:
    """Return a device with its number, by the current device of this thread: each thread has its own."""
    if device.index is not None or not devices.has_streams(device):
        return device
    return torch.device(device.type, getattr(torch, device.type).current_device())


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor in this dtype; whole numbers in place of floating point ones are quantized and stay."""
    if tensor.dtype == dtype or (dtype.is_floating_point and not tensor.is_floating_point()):
        return tensor
    return tensor.to(dtype)


@dataclass(kw_only=True, slots=True, eq=False)
class _Job:
    """One fetch, done by the thread or by the module that needs it, whichever is first."""

    need: Need
    device: torch.device
    way: Staging | None = None
    lock: Any = field(default_factory=threading.Lock)
    is_done: bool = False
    tensors: dict[str, torch.Tensor] | None = None
    error: BaseException | None = None
    event: Any = None

    def run(self, stream: Any = None, *, beside: bool = False) -> None:
        """Fetch unless that is done.

        Args:
            stream: of the device, beside the one that computes; None where it has none.
            beside: whether a module computes meanwhile.
        """
        with self.lock:
            if self.is_done:
                return
            try:
                self._run(stream, beside)
            except BaseException as error:  # raised where the weights are needed
                self.error = error
            self.is_done = True

    def _run(self, stream: Any, beside: bool) -> None:
        if stream is None:
            self.tensors = self.need.fetch(self.device, self.way, beside=beside)
            return
        runtime: Any = getattr(torch, self.device.type)
        with runtime.device(self.device), runtime.stream(stream):
            self.tensors = self.need.fetch(self.device, self.way, beside=beside)
            self.event = stream.record_event()

    def result(self) -> dict[str, torch.Tensor]:
        """Return the weights, ready for the caller's stream; raise what the fetch raised.

        They are the caller's from then on: a thread that is late holds this job until it has seen it.
        """
        self.run()
        if isinstance(self.error, (torch.OutOfMemoryError, MemoryError)):
            # the module that computed meanwhile had used the memory
            return self.need.fetch(self.device, self.way)
        if self.error is not None:
            raise self.error
        tensors, self.tensors = self.tensors, None
        assert tensors is not None
        if self.event is not None:
            stream = getattr(torch, self.device.type).current_stream(self.device)
            stream.wait_event(self.event)
            for tensor in tensors.values():
                tensor.record_stream(stream)
        return tensors


class Prefetcher:
    """Knows in which order modules need their weights, and fetches ahead of them.

    It fetches one need ahead, or several that are no larger together than the largest. Before the first forward the
    order is that of the calls of `expect`. Later it is that of the last forward of the whole model, followed by what
    that forward did not need. A thread starts when there is work, and ends with it. Forwards of several threads run
    one after the other.

    Attributes:
        places: the stand-in of each offloaded weight, for modules that share it.
        back: the weight that replaced a stand-in when a hook was removed.
    """

    def __init__(self) -> None:
        self.places: Any = WeakTensorKeyDictionary()
        self.back: Any = WeakTensorKeyDictionary()
        self._order: list[Need] = []
        self._length = 0  # how much of the order one forward needs
        self._seen: list[Need] | None = None  # while the whole model computes
        self._at = -1
        self._room = 0
        self._ahead: dict[Need, _Job] = {}
        self._queue: deque[_Job] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._streams: dict[torch.device, Any] = {}  # of that thread
        self._ways: dict[torch.device, Staging] = {}
        self._lease = ReentrantLease()
        self._process = os.getpid()

    def expect(self, need: Need) -> None:
        """Note that a module will need these weights after those of earlier calls."""
        self._order.append(need)
        self._length = len(self._order)
        self._room = max(self._room, need.nbytes)

    def replace(self, old: Need, new: Need) -> None:
        """Note that a module needs other weights from now on; what was fetched ahead for it is dropped."""
        self._renew()
        with self._lock:
            self._order = [new if need is old else need for need in self._order]
            if self._seen is not None:
                self._seen = [new if need is old else need for need in self._seen]
            self._ahead.pop(old, None)
            self._queue = deque(job for job in self._queue if job.need is not old)

    def begin(self) -> None:
        """Wait until no other thread is in a forward, and fetch what the first modules of this one need."""
        self._renew()
        if self._lease.acquire():
            self._forget()
            self._seen = []
            self._fetch_ahead()

    def end(self, *, whole: bool = True) -> None:
        """Forget a forward that has ended, except for its order.

        Args:
            whole: False where the forward raised: its order is forgotten too.
        """
        self._lease.release(lambda: self._finish(whole))

    def _finish(self, whole: bool) -> None:
        if self._seen and whole:
            known = set(self._seen)
            self._order = [*self._seen, *(need for need in self._order if need not in known)]
            self._length = len(self._seen)
        self._forget()

    def take(self, need: Need) -> dict[str, torch.Tensor]:
        """Return the weights that a module needs now, and let the next ones be fetched."""
        self._renew()
        with self._lock:
            if self._seen is not None:
                self._seen.append(need)
            self._at = self._find(need)
            job = self._ahead.pop(need, None)
            upcoming = set(self._upcoming())
            for other in self._ahead.keys() - upcoming:  # this forward takes another way than the last one
                del self._ahead[other]
            self._queue = deque(other for other in self._queue if other in self._ahead.values())
        if job is None:
            self._fetch_ahead()
            device = _add_number(need.device)
            return need.fetch(device, self._find_way(device))
        tensors = job.result()
        self._fetch_ahead()
        return tensors

    def _renew(self) -> None:
        """Start afresh in a forked process: a thread that is not there may have held a lock."""
        if self._process != os.getpid():
            self.__setstate__(self.__getstate__())

    def _forget(self) -> None:
        self._seen = None
        self._at = -1
        with self._lock:
            self._ahead = {}
            self._queue.clear()

    def _find(self, need: Need) -> int:
        """Return the place of this need in the order; the search starts after the last place."""
        count = len(self._order)
        for step in range(count):
            place = (self._at + 1 + step) % count
            if self._order[place] is need:
                return place
        return count  # unknown: nothing follows

    def _upcoming(self) -> Sequence[Need]:
        chosen: list[Need] = []
        size = 0
        end = self._length if self._at < self._length else len(self._order)
        for need in self._order[self._at + 1 : end]:
            if chosen and size + need.nbytes > self._room:
                break
            if need not in chosen:
                chosen.append(need)
                size += need.nbytes
        return chosen

    def _fetch_ahead(self) -> None:
        with self._lock:
            for need in self._upcoming():
                if need not in self._ahead:
                    device = _add_number(need.device)
                    self._ahead[need] = _Job(need=need, device=device, way=self._find_way(device))
                    if not need.is_near:
                        self._queue.append(self._ahead[need])
            if self._queue and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._work, name="weights of the next module")
                with contextlib.suppress(RuntimeError):  # no thread starts while the interpreter ends
                    self._thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._thread = None
                    return
                job = self._queue.popleft()
            job.run(self._stream(job.device), beside=True)
            del job  # the model alone keeps what was fetched

    def _stream(self, device: torch.device) -> Any:
        """Return the stream for fetches to a device, None where it has none.

        It is always the same one: torch keeps the memory of each stream for that stream alone.
        """
        if device not in self._streams:
            made = getattr(torch, device.type).Stream(device) if devices.has_streams(device) else None
            self._streams[device] = made
        return self._streams[device]

    def _find_way(self, device: torch.device) -> Staging | None:
        return self._ways.setdefault(device, Staging(device)) if staging.is_for(device) else None

    def __getstate__(self) -> dict[str, Any]:
        return {"order": self._order, "length": self._length, "room": self._room}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self._order, self._length, self._room = state["order"], state["length"], state["room"]
