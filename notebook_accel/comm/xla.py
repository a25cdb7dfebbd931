"""The runtime of torch_xla, its collectives, and the way of batches to its devices; torch_xla is imported on use."""

from __future__ import annotations

import importlib
import pickle
from dataclasses import dataclass
from typing import Any, Final

import torch

from .. import nested
from ..caller import warn
from .base import Comm, ReduceOp

_SEEDS: Final = 2**64
_SMALLEST_MESSAGE: Final = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What this process, or this thread of it, is to the runtime of torch_xla.

    Attributes:
        device: where its tensors are; with SPMD a virtual one that stands for all.
        rank: among all devices of the run; 0 with SPMD.
        world_size: number of devices of the run, each with its own copy of the program; 1 with SPMD.
        local_rank: among the devices of this machine.
        local_world_size: number of devices of this machine.
        node_rank: of this machine.
        has_thread: True if each thread of the process has its own device.
        mesh: all devices in a row, along which batches are split; None without SPMD.
    """

    device: torch.device
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int = 0
    has_thread: bool = False
    mesh: Any = None


def enter(*, spmd: bool, local_rank: int, local_world_size: int) -> Place:
    """Start the runtime if it is not started, and return the place of this thread in it.

    Args:
        spmd: run one program over all devices.
        local_rank: of this process on its machine; used if the runtime does not know it yet.
        local_world_size: processes of this machine; used likewise.

    Raises:
        ValueError: `spmd` is asked for, and the devices belong to several processes.
    """
    runtime = _runtime()
    if spmd or runtime.is_spmd():
        return _enter_spmd(runtime)
    core = _core()
    if local_world_size > 1 and core._xla_get_replication_devices_count() == 0:
        importlib.import_module("torch_xla._internal.pjrt").initialize_multiprocess(
            local_rank, local_world_size
        )
    device = _library().device()
    if core._xla_get_replication_devices_count() == 0:
        return Place(device=device, rank=0, world_size=1, local_rank=0, local_world_size=1)
    rank, world_size = runtime.global_ordinal(), runtime.global_device_count()
    one_node = runtime.local_device_count() == world_size
    return Place(
        device=device,
        rank=rank,
        world_size=world_size,
        # ranks follow the wiring of the devices, which need not be the order of this machine's processes
        local_rank=rank if one_node else runtime.local_ordinal(),
        local_world_size=runtime.local_device_count(),
        node_rank=0 if one_node else runtime.host_index(),
        has_thread=runtime.addressable_device_count() > 1,
    )


def _enter_spmd(runtime: Any) -> Place:
    if not runtime.is_spmd():
        runtime.use_spmd()
    if runtime.process_count() > 1:
        raise ValueError(
            f"one program over all devices needs them in one process, and they belong to {runtime.process_count()}: "
            "leave NOTEBOOK_ACCEL_TPU_MODE out, which gives every device its own process"
        )
    number = runtime.global_runtime_device_count()
    spmd = importlib.import_module("torch_xla.distributed.spmd")
    return Place(
        device=_library().device(),
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        mesh=spmd.Mesh(list(range(number)), (number,), ("data",)),
    )


def sync() -> None:
    """Let the device begin with all operations recorded so far, and return at once."""
    _library().sync()


def seed() -> int:
    """Return the state of the device's random numbers. Every `sync` and every draw changes it."""
    sync()  # so that the state does not depend on operations that have not run
    return int(_model().get_rng_state())


def set_seed(value: int) -> None:
    """Set the state of the device's random numbers.

    Args:
        value: the state; only its lowest 64 bits count.
    """
    _model().set_rng_state(value % _SEEDS)


def tensor_id(tensor: torch.Tensor) -> int:
    """Return a number that tensors have in common only if they share their memory.

    The address is of no use: it is 0 for all tensors of the device.

    Args:
        tensor: on the device.
    """
    return int(_core()._xla_get_tensor_id(tensor))


def broadcast_model(model: torch.nn.Module) -> None:
    """Overwrite a model's parameters and buffers with those of rank 0.

    Args:
        model: on the device.
    """
    _model().broadcast_master_param(model)
    sync()


def average(tensors: list[torch.Tensor], world_size: int) -> None:
    """Replace tensors by their means over all ranks.

    Args:
        tensors: on the device.
        world_size: number of ranks.
    """
    if tensors:
        _model().all_reduce("sum", tensors, scale=1.0 / world_size)


def to_cpu(tree: Any) -> Any:
    """Return nested data with the device's tensors moved to the CPU.

    Args:
        tree: nested data. Tensors that share memory on the device share it on the CPU too.
    """
    if not any(
        isinstance(leaf, torch.Tensor) and leaf.device.type == "xla" for leaf in nested.leaves_of(tree)
    ):
        return tree
    moved: dict[int, torch.Tensor] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "xla":
            return tensor
        number = tensor_id(tensor)
        if number not in moved:
            moved[number] = tensor.detach().cpu()
        return moved[number]

    return nested.recursively_apply(move, tree)


class XlaComm(Comm):
    """Collectives between devices that each run their own copy of the program.

    Every collective is a program of its own. So it is the same on all ranks, whatever each of them did before.
    """

    def __init__(self, place: Place, *, debug: bool = False) -> None:
        self.rank = place.rank
        self.world_size = place.world_size
        self.device = place.device
        self.debug = debug

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        sync()
        gathered: torch.Tensor = _model().all_gather(tensor.contiguous(), dim=0)
        sync()
        return gathered

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        sync()
        scale = 1.0 / self.world_size if op == "mean" else 1.0
        _model().all_reduce("sum" if op == "mean" else op, [tensor], scale=scale)
        sync()
        return tensor

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        # sum the tensor of rank src and zeros. The rank is a value: collectives of different programs never meet
        chosen = torch.tensor(self.rank == src).to(self.device)
        sent = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
        sent = torch.where(chosen, sent, torch.zeros_like(sent))
        with torch.no_grad():
            tensor.copy_(self.all_reduce(sent))
        sync()
        return tensor

    def all_gather_object(self, obj: Any) -> list[Any]:
        payload = bytearray(pickle.dumps(obj))
        length = torch.tensor([len(payload)]).to(self.device)
        lengths = self.all_gather(length).tolist()
        # every new shape is compiled, so use few
        width = max(_SMALLEST_MESSAGE, 1 << (max(lengths) - 1).bit_length())
        padded = torch.zeros(width, dtype=torch.uint8)
        padded[: len(payload)] = torch.frombuffer(payload, dtype=torch.uint8)
        rows = self.all_gather(padded.to(self.device)).cpu().view(len(lengths), width)
        return [
            pickle.loads(row[:length].numpy().tobytes()) for row, length in zip(rows, lengths, strict=True)
        ]

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        return self.all_gather_object(obj if self.rank == src else None)[src]

    def barrier(self) -> None:
        _model().rendezvous("notebook_accel")


class XlaFeed:
    """Sends batches to the device; with SPMD each device gets its part of the rows.

    Args:
        place: that of this thread.
        speaks: False if another process gives the advice on shapes.
    """

    def __init__(self, place: Place, *, speaks: bool = True) -> None:
        self._device = place.device
        self._mesh = place.mesh
        self._silent = not speaks

    def mark(self) -> None:
        """End the program of one batch. Without this, programs would grow from batch to batch."""
        sync()

    def open(self) -> _Sender:
        """Return a callable that sends the batches of one epoch."""
        return _Sender(self)

    def send(self, batch: Any) -> Any:
        """Return a batch on the device.

        Args:
            batch: nested data.
        """
        if self._mesh is not None:
            batch = nested.recursively_apply(self._split, batch)
        return nested.send_to_device(batch, self._device)

    def _split(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 0 or tensor.device.type != "cpu" or type(tensor) is not torch.Tensor:
            return tensor
        spmd = importlib.import_module("torch_xla.distributed.spmd")
        spec = spmd.ShardingSpec(self._mesh, ("data", *[None] * (tensor.ndim - 1)))
        sent: torch.Tensor = _model().send_cpu_data_to_device([tensor], self._device, spec)[0]
        return sent

    def advise(self, first: list[tuple[int, ...]], other: list[tuple[int, ...]]) -> None:
        """Warn once that batches have several shapes.

        Args:
            first: the shapes of a batch's tensors.
            other: those of a later batch.
        """
        if self._silent:
            return
        self._silent = True
        before, after = next(pair for pair in zip(first, other, strict=False) if pair[0] != pair[1])
        warn(
            f"a batch of shape {list(after)} comes after one of shape {list(before)}: every new shape is compiled, "
            "which takes longer than a step. Give the DataLoader drop_last=True, or pad batches in its collate_fn",
        )


class _Sender:
    """Sends the batches of one epoch, and notices when their shapes change."""

    def __init__(self, feed: XlaFeed) -> None:
        self._feed = feed
        self._shapes: list[tuple[int, ...]] | None = None

    def __call__(self, batch: Any) -> Any:
        leaves = nested.leaves_of(batch)
        shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if self._shapes is None:
            self._shapes = shapes
        elif len(shapes) == len(self._shapes) and shapes != self._shapes:
            self._feed.advise(self._shapes, shapes)
        return self._feed.send(batch)


def _library() -> Any:
    return importlib.import_module("torch_xla")


def _model() -> Any:
    return importlib.import_module("torch_xla.core.xla_model")


def _runtime() -> Any:
    return importlib.import_module("torch_xla.runtime")


def _core() -> Any:
    return _library()._XLAC
