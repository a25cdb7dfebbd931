"""The collectives of torch.distributed."""

from __future__ import annotations

import atexit
import contextlib
import time
import weakref
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .. import devices, environ
from ..topology import Topology
from .base import Comm, ReduceOp
from .gathers import gathers_of
from .packing import view_as_bytes

_LAST_WORK_S: Final = 0.05
"""Seconds to wait before Python ends. In these gloo's thread frees the tensors of the last collective. A thread that
asks for Python's lock later is ended within C++ code, which aborts the process."""

_LEAVING_S: Final = 10.0
"""Seconds that a rank waits for the others when it leaves the group."""
_LONGEST_PAUSE_S: Final = 0.25

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
        group: the process group, whose ranks count. By default that of all processes: if it is destroyed and another
            one opened, that one.
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
        self._is_default = group is dist.group.WORLD
        # weak: gloo's threads abort a process in which the group still exists at its end, and sockets end with it
        self._group = weakref.ref(group)
        self._gathers = weakref.ref(gathers_of(group))
        self._barrier_ids = None if device.index is None else [device.index]

    @property
    def group(self) -> Any:
        """The process group; RuntimeError where it was destroyed, or another one has other ranks."""
        group = dist.group.WORLD if self._is_default else self._group()
        if group is None:
            raise RuntimeError(
                "the process group was destroyed: use collectives before that, or open another one on all ranks by "
                "torch.distributed.init_process_group"
            )
        if group is not self._group():
            self._change_group(group)
        return group

    def _change_group(self, group: Any) -> None:
        place = dist.get_rank(group), dist.get_world_size(group)
        if place != (self.rank, self.world_size):
            raise RuntimeError(
                f"this process was rank {self.rank} of {self.world_size}, and is rank {place[0]} of {place[1]} in the "
                "process group that is open now: call AcceleratorState._reset_state(True), and make a new Accelerator"
            )
        self._group = weakref.ref(group)
        self._gathers = weakref.ref(gathers_of(group))
        self.owned = False  # who opened it destroys it

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():  # a rank may compile alone, and has to gather as the others do
            outside: torch.Tensor = _gather_outside_graph(self, tensor)
            return outside
        return self._all_gather(tensor)

    def _all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype not in _SENT:
            as_bytes = self._all_gather(view_as_bytes(tensor.reshape(-1)))
            return as_bytes.view(tensor.dtype).view(self.world_size * tensor.shape[0], *tensor.shape[1:])
        group = self.group
        rows, *others = tensor.shape
        gathered = tensor.new_empty((self.world_size * rows, *others))
        if type(tensor) is torch.Tensor and tensor.is_neg():  # memory has the numbers without their sign
            tensor = tensor.resolve_neg()
        gathers = self._gathers()
        assert gathers is not None, "they live as long as the group"
        gathers.gather(group, tensor.contiguous(), gathered)
        return gathered

    def connect_soon(self) -> None:
        """Let sizes be compared from the next gather on, where ranks can connect; all ranks call this before it.

        Without a connection gloo ends a process that gets more than it expects.
        """
        gathers = self._gathers()
        if gathers is not None:
            gathers.connect_soon()

    def count_gathers(self) -> dict[str, int]:
        """Return what decides which way the next gather goes; ranks where it differs would wait for each other."""
        gathers = self._gathers()
        return {} if gathers is None else gathers.count()

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
        # some ranks may go on in a group that is not ours: the way of their gathers stays
        if self.owned and dist.group.WORLD is self._group():
            wait_for_leaving_ranks()
            close_group()
        self.owned = False

    def shut_down_sockets(self) -> None:
        """End the gather over sockets in which a thread waits; gathers raise from then on."""
        gathers = self._gathers()
        if gathers is not None:
            gathers.shut_down()


@torch._disable_dynamo
def _gather_outside_graph(comm: TorchComm, tensor: torch.Tensor) -> torch.Tensor:
    return comm._all_gather(tensor)


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
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **options)


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


def wait_for_leaving_ranks() -> None:
    """Wait until all ranks are done with the default group, or seconds are over: one may have ended long ago.

    A rank that leaves early resets its peers' connections. They may be in their last collective still, or not even
    through with opening the group. Torch has such a wait too, for its barrier, which warns where it was in vain.
    """
    with contextlib.suppress(Exception):  # the rank that serves the store has left: all were done
        store = dist.distributed_c10d._get_default_store()
        if store.add("notebook_accel/done", 1) == dist.get_world_size():
            store.set("notebook_accel/all_done", "1")
        began = time.monotonic()
        while not store.check(["notebook_accel/all_done"]) and time.monotonic() - began < _LEAVING_S:
            time.sleep(min(_LONGEST_PAUSE_S, 0.001 + (time.monotonic() - began) / 8))


def close_group(group: Any = None) -> None:
    """Destroy a process group, if there is a default one.

    Args:
        group: the group; None for the default one, with which all others end.
    """
    if group_exists():
        default = dist.group.WORLD
        if group is None or group is default:
            gathers_of(
                default
            ).close()  # who keeps the group, such as a model, would keep the other ranks waiting
        del default
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
