"""The collectives of torch.distributed."""

from __future__ import annotations

import atexit
import contextlib
import sys
import time
import weakref
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import AllgatherOptions, default_pg_timeout

from .. import devices, environ
from ..topology import Topology
from . import local_sockets
from .base import Comm, ReduceOp
from .local_sockets import LocalSockets
from .packing import view_as_bytes

_LAST_WORK_S: Final = 0.01
"""Seconds to wait before Python ends. In these gloo's thread frees the tensors of the last collective. A thread that
asks for Python's lock later is ended within C++ code, which aborts the process."""

_GATHERS_BEFORE_SOCKETS: Final = 32
"""Gathers by gloo before ranks of one machine connect for small ones; fewer are not worth it."""

_OPS: Final = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}

_SENT: Final = frozenset(
    (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool),
    )
)
"""Dtypes that gloo and NCCL know; others are gathered and broadcast as bytes."""


class TorchComm(Comm):
    """The collectives of a process group, which has to exist.

    Args:
        device: where tensors of collectives are.
        debug: see `Comm`.
        owned: True if this package opened the default group; then `close` destroys it.
        group: the process group, whose ranks count; by default that of all processes.
    """

    scatters = True

    def __init__(
        self, device: torch.device, *, debug: bool = False, owned: bool = False, group: Any = None
    ) -> None:
        group = dist.group.WORLD if group is None else group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.device = device
        self.debug = debug
        self.owned = owned
        # weak: gloo's threads abort a process in which the group still exists at its end
        self._group = weakref.ref(group)
        self._gather = "all_gather_single" if hasattr(group, "all_gather_single") else "_allgather_base"
        self._gather_options = AllgatherOptions()
        self._gather_options.asyncOp = False
        self._barrier_ids = None if device.index is None else [device.index]
        # only what all ranks know alike decides whether they connect
        self._may_use_sockets = (
            device.type == "cpu"
            and group is dist.group.WORLD
            and self.world_size <= local_sockets.MAX_RANKS
            and dist.get_backend(group) == "gloo"
            and dist.get_debug_level() != dist.DebugLevel.DETAIL  # then torch compares collectives
        )
        self._num_gathers = 0
        self._sockets: LocalSockets | None = None

    @property
    def group(self) -> Any:
        """The process group; RuntimeError where it was destroyed."""
        group = self._group()
        if group is None:
            raise RuntimeError(
                "the process group was destroyed: use collectives before that, or make a new Accelerator"
            )
        return group

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype not in _SENT:
            as_bytes = self.all_gather(view_as_bytes(tensor.reshape(-1)))
            return as_bytes.view(tensor.dtype).view(self.world_size * tensor.shape[0], *tensor.shape[1:])
        rows, *others = tensor.shape
        gathered = tensor.new_empty((self.world_size * rows, *others))
        if self._may_use_sockets:
            sockets = self._find_sockets()
            if sockets is not None:
                # a size that differs raises on all ranks, also where it would send them different ways
                if tensor.nbytes <= local_sockets.MAX_BYTES:
                    own = tensor.resolve_neg().contiguous()
                    sockets.exchange(own.data_ptr(), own.nbytes, gathered.data_ptr())
                    return gathered
                sockets.agree_on_size(tensor.nbytes)
        # the group's own method: dist.all_gather_into_tensor adds a third to the time of a small message
        work = getattr(self.group, self._gather)(gathered, tensor.contiguous(), self._gather_options)
        if work is not None:
            work.wait()
        return gathered

    def _find_sockets(self) -> LocalSockets | None:
        """Return the sockets of all gathers from one on, at which all ranks connect."""
        group = self.group  # raises where it was destroyed
        self._num_gathers += 1
        if self._num_gathers == _GATHERS_BEFORE_SOCKETS:
            options = getattr(group._get_backend(self.device), "options", None)
            timeout = getattr(options, "_timeout", None) or default_pg_timeout
            self._sockets = local_sockets.connect(
                self.rank, self.world_size, self._gather_objects, timeout.total_seconds()
            )
            self._may_use_sockets = self._sockets is not None
        return self._sockets

    def count_gathers(self) -> dict[str, int]:
        """Return what decides which way the next gather goes; ranks where it differs would wait for each other."""
        if self._sockets is None:
            return {"gathers": self._num_gathers, "sockets": 0, "gathers over sockets": 0}
        return {
            "gathers": self._num_gathers,
            "sockets": 1,
            "gathers over sockets": self._sockets.num_exchanges,
        }

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        dist.all_reduce(tensor, _OPS[op], group=self.group)
        if op == "mean":
            tensor.div_(self.world_size)
        return tensor

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        sent = tensor if tensor.dtype in _SENT else view_as_bytes(tensor.reshape(-1))
        dist.broadcast(sent, group=self.group, group_src=src)
        if sent.data_ptr() != tensor.data_ptr():  # the bytes of a conjugated tensor are a copy
            tensor.copy_(sent.view(tensor.dtype).view(tensor.shape))
        return tensor

    def scatter(self, tensor: torch.Tensor, parts: list[torch.Tensor] | None, src: int = 0) -> torch.Tensor:
        dist.scatter(tensor, parts, group=self.group, group_src=src)
        return tensor

    def all_gather_object(self, obj: Any) -> list[Any]:
        return self._gather_objects(obj)

    def _gather_objects(self, obj: Any) -> list[Any]:
        """Gather as `all_gather_object`; who counts or replaces that one does not see how ranks connect."""
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, obj, group=self.group)
        return gathered

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        holder = [obj]
        dist.broadcast_object_list(holder, group=self.group, group_src=src)
        return holder[0]

    def barrier(self) -> None:
        dist.barrier(group=self.group, device_ids=self._barrier_ids)

    def close(self) -> None:
        if not self.owned:  # some ranks may go on: the way of their gathers stays
            return
        self.leave_sockets()
        if dist.is_initialized():
            dist.destroy_process_group()
        self.owned = False

    def leave_sockets(self) -> None:
        """Close the sockets to other ranks: the process group ends."""
        if self._sockets is not None:
            self._sockets.close()
        self._sockets, self._may_use_sockets = None, False

    def shut_down_sockets(self) -> None:
        """End the gather over sockets in which a thread waits; gathers raise from then on."""
        if self._sockets is not None:
            self._sockets.shut_down()


def group_exists() -> bool:
    """Return True if this process is in a process group already."""
    return dist.is_available() and dist.is_initialized()


def group_backend() -> str:
    """Return the backend of the default group: `gloo`, or `cpu:gloo,cuda:nccl` if it has several."""
    name = str(dist.get_backend())
    return name if name in ("gloo", "nccl", "xccl", "mpi") else str(dist.get_backend_config())


def group_place() -> tuple[int, int]:
    """Return rank and world size in the default group."""
    return dist.get_rank(), dist.get_world_size()


def open_group(
    topology: Topology,
    backend: str,
    *,
    device: torch.device,
    timeout: timedelta | None = None,
    init_method: str | None = None,
) -> None:
    """Open the default process group.

    Args:
        topology: rank and world size.
        backend: torch's name of the backend, or several as in `cpu:gloo,cuda:nccl`.
        device: of this rank.
        timeout: of collectives; None for torch's default.
        init_method: URL where the ranks meet. None, or `env://`, is MASTER_ADDR:MASTER_PORT, by default
            127.0.0.1:29500 on one node.

    Raises:
        ValueError: torch lacks torch.distributed, or there are several nodes and MASTER_ADDR is not set.
    """
    if not dist.is_available():
        raise ValueError(
            f"WORLD_SIZE is {topology.world_size}, but this torch was built without torch.distributed"
        )
    if init_method is None or init_method == "env://":
        _default_rendezvous(topology)
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    options |= _bind(device, backend)
    dist.init_process_group(
        backend,
        init_method=init_method,
        rank=topology.rank,
        world_size=topology.world_size,
        **options,
    )
    if "gloo" in backend and not environ.flag("FORK_LAUNCHED"):  # a launched worker ends without atexit
        atexit.register(time.sleep, _LAST_WORK_S)


def _bind(device: torch.device, backend: str) -> dict[str, Any]:
    """Return the option that tells NCCL which device is this process's.

    Other kinds of devices are not bound: torch looks for a bound device in every later group too, and one of gloo has
    CUDA's beside the CPU only.
    """
    return {"device_id": device} if "nccl" in backend and device.type == "cuda" else {}


def open_group_of_one(device: torch.device, backend: str | None = None) -> None:
    """Open the default process group of a run of one process, for code that needs a group.

    Args:
        device: of the process.
        backend: torch's name of it. By default one that works on tensors of the device and of the CPU.

    Raises:
        ValueError: torch lacks torch.distributed.
    """
    if not dist.is_available():
        raise ValueError("sharded models need torch.distributed, which this torch was built without")
    kind = devices.kind_of(device.type)
    backend = backend or (kind if kind.indexed and kind.backend else devices.CPU).both_backends
    options = _bind(device, backend)
    if sys.platform == "win32":
        store: dist.Store = dist.TCPStore("127.0.0.1", 0, 1, True)
    else:
        store = dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=1, **options)


def new_group(backend: str) -> Any:
    """Return a new group of all processes. All of them have to call this.

    It ends when the default group ends.

    Args:
        backend: torch's name of it.
    """
    return dist.new_group(backend=backend)


def count_collectives(comm: Comm | None = None) -> dict[str, int] | None:
    """Return how many collectives each group of this process has begun, by the group's name.

    A group that has a backend for each kind of device counts those of all of them.

    Args:
        comm: whose gathers without the process group count too, and what decides about them.

    Returns:
        None if there is no default group.
    """
    if not group_exists():
        return None
    groups: list[Any] = [
        group for group in distributed_c10d._world.pg_map if isinstance(group, dist.ProcessGroup)
    ]
    counts = {}
    for group in groups:
        numbers = {}
        for device in getattr(group, "_device_types", ()):
            with contextlib.suppress(RuntimeError, AttributeError):  # not every backend and version counts
                backend = group._get_backend(device)
                numbers[id(backend)] = backend._get_sequence_number_for_group()
        if numbers:
            counts[group.group_name] = sum(numbers.values())
    if isinstance(comm, TorchComm):
        counts |= comm.count_gathers()
    return counts


def abort_groups() -> None:
    """Abort the collectives of groups of backends other than gloo. A thread that waits in one gets an error."""
    if group_exists() and group_backend() != "gloo":
        distributed_c10d._abort_process_group()


def close_group(group: Any = None) -> None:
    """Destroy a process group, if there is a default one.

    Args:
        group: the group; None for the default one, with which all others end.
    """
    if group_exists():
        dist.destroy_process_group(group)


def _default_rendezvous(topology: Topology) -> None:
    missing = {}
    if not environ.get("MASTER_ADDR"):
        if topology.num_nodes > 1:
            raise ValueError(
                f"the run has {topology.num_nodes} nodes and MASTER_ADDR is not set: "
                "set it on every node to the address of the node with rank 0"
            )
        missing["MASTER_ADDR"] = "127.0.0.1"
    if not environ.get("MASTER_PORT"):
        missing["MASTER_PORT"] = "29500"
    if missing:
        environ.put(missing)
