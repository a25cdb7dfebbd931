"""Fills a sharded model with weights: one parameter after the other, with rank 0's values or each process's own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..comm.base import Comm
from ..dtensors import from_local, is_sharded, to_local

_META = torch.device("meta")


@dataclass(kw_only=True, slots=True)
class Originals:
    """What a model held before it was sharded.

    Attributes:
        parameters: its own, by their first name.
        buffers: its own, by their first name.
    """

    parameters: dict[str, torch.nn.Parameter]
    buffers: dict[str, torch.Tensor]


def is_plain(model: torch.nn.Module) -> bool:
    """Return True if all parameters are torch's own tensors, not of a subclass such as that of float8 weights."""
    return all(
        type(parameter) is torch.nn.Parameter and type(parameter.data) is torch.Tensor
        for parameter in model.parameters()
    )


def agree(model: torch.nn.Module, comm: Comm, *, from_first: bool) -> bool:
    """Return whether the processes have values for the model; all of them call it.

    Args:
        model: not sharded yet.
        comm: the collectives.
        from_first: only rank 0 needs values.

    Raises:
        ValueError: the processes' models differ, or some of the values are missing.
    """
    told = hashlib.sha256()
    empty: list[str] = []
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        told.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        if tensor.device == _META:
            empty.append(name)
    total = len(tensors)
    found = comm.all_gather_object((told.hexdigest(), len(empty), empty[:3]))
    if different := [rank for rank, item in enumerate(found) if item[0] != found[0][0]]:
        raise ValueError(
            f"the model of rank {different[0]} has other names, shapes or dtypes than that of rank 0: build the same "
            "one in every process"
        )
    counts = [item[1] for item in (found[:1] if from_first else found)]
    if all(count == total for count in counts) and total:
        return False
    for rank, count in enumerate(counts):
        if count:
            raise ValueError(
                f"rank {rank} has no values for {count} of {total} tensors, {', '.join(found[rank][2])} among them: "
                "they are on the meta device. Load them there, or leave the whole model there in every process"
            )
    return True


def empty_out(model: torch.nn.Module) -> Originals:
    """Replace a model's tensors by new ones on the meta device, shared as before, and return what it held."""
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    made: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, tensor in list(store.items()):
                if tensor is not None:
                    if tensor not in made:
                        made[tensor] = _on_meta(tensor)
                    store[name] = made[tensor]  # type: ignore[assignment]
    return Originals(parameters=parameters, buffers=buffers)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    layout = torch.contiguous_format if tensor.layout is torch.strided else torch.preserve_format
    empty = torch.empty_like(tensor, device=_META, requires_grad=False, memory_format=layout)
    if isinstance(tensor, torch.nn.Parameter):
        made = torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
        vars(made).update(vars(tensor))  # attributes that users and libraries set
        return made
    return empty


@torch.no_grad()
def fill(
    model: torch.nn.Module,
    originals: Originals,
    comm: Comm,
    devices: Callable[[torch.Tensor], torch.device],
    *,
    from_first: bool,
) -> None:
    """Give a sharded model on the meta device memory and values, one parameter after the other.

    Args:
        model: sharded.
        originals: what it held; each value is removed once it is used.
        comm: of all processes.
        devices: where a parameter or buffer lives.
        from_first: all start with rank 0's values, else each with its own.
    """
    materialize(model, devices)
    for name, parameter in model.named_parameters():
        value: torch.Tensor | None = originals.parameters.pop(name)
        if from_first and comm.world_size > 1:
            _scatter(parameter, value if comm.rank == 0 else None, comm)
        else:
            assert value is not None
            _keep_own(parameter, value)
        value = None
    for name, buffer in model.named_buffers():
        held = originals.buffers.pop(name)
        if comm.rank == 0 or not from_first:
            buffer.copy_(held)
        if from_first and comm.world_size > 1:
            _broadcast(buffer, comm)


@torch.no_grad()
def materialize(model: torch.nn.Module, devices: Callable[[torch.Tensor], torch.device]) -> None:
    """Allocate memory for all tensors of a sharded model that are on the meta device; parameters stay the same objects.

    Args:
        model: sharded by fully_shard.
        devices: returns where a parameter or buffer goes.
    """
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.device == _META:
                memory = torch.empty_like(to_local(parameter), device=devices(parameter), requires_grad=False)
                if is_sharded(parameter):
                    memory = from_local(memory, parameter)
                made = torch.nn.Parameter(memory, parameter.requires_grad)
                vars(made).update(vars(parameter))
                torch.utils.swap_tensors(parameter, made)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device == _META:
                module._buffers[name] = torch.empty_like(buffer, device=devices(buffer))


@torch.no_grad()
def load_first(
    model: torch.nn.Module,
    state: Mapping[str, torch.Tensor],
    comm: Comm,
    devices: Callable[[torch.Tensor], torch.device],
) -> None:
    """Load rank 0's state into a sharded model; all processes call it.

    Args:
        model: sharded by fully_shard.
        state: tensors by name; only rank 0's counts.
        comm: the collectives.
        devices: returns where a parameter or buffer goes.

    Raises:
        ValueError: on all processes, if the state does not fit.
    """
    own: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    problem = None
    if comm.rank == 0:
        wrong = sorted(own.keys() ^ state.keys())
        wrong = wrong or [name for name, value in own.items() if value.shape != state[name].shape]
        problem = f"the state does not fit the model: see {wrong[0]!r}" if wrong else None
    if problem := comm.broadcast_object(problem):
        raise ValueError(problem)
    materialize(model, devices)
    own = model.state_dict(keep_vars=True)
    done: set[int] = set()
    for name, tensor in own.items():
        if id(tensor) not in done:
            done.add(id(tensor))
            if comm.world_size > 1:
                _scatter(tensor, state[name] if comm.rank == 0 else None, comm)
            else:
                _keep_own(tensor, state[name])


@torch.no_grad()
def copy_first(model: torch.nn.Module, comm: Comm) -> None:
    """Copy rank 0's values to all processes; the model is whole in each of them.

    Args:
        model: not sharded.
        comm: the collectives.
    """
    if comm.world_size == 1:
        return
    for tensor in [*model.parameters(), *model.buffers()]:
        if type(tensor.data) is torch.Tensor:
            _broadcast(tensor.data, comm)


def _keep_own(parameter: torch.Tensor, value: torch.Tensor) -> None:
    part = to_local(parameter)
    if not is_sharded(parameter):
        part.copy_(value)
        return
    mesh, dimension, placement = _sharding(parameter)
    pieces = list(_pieces(value.detach(), mesh.size(dimension), placement))
    piece = pieces[mesh.get_local_rank(dimension)]
    if piece.numel():
        part.copy_(piece)


def _scatter(parameter: torch.Tensor, value: torch.Tensor | None, comm: Any) -> None:
    """Send each process its part of rank 0's value; the others need no memory for more."""
    part = to_local(parameter)
    if not is_sharded(parameter):
        if value is not None:
            part.copy_(value)
        _broadcast(part, comm)
        return
    mesh, dimension, placement = _sharding(parameter)
    size = mesh.size(dimension)
    largest = list(parameter.shape)
    largest[placement.dim] = -(-largest[placement.dim] // size)
    received = torch.empty(largest, dtype=part.dtype, device=comm.device)
    sent: list[torch.Tensor] | None = None
    if value is not None:
        pieces = [
            _pad(piece.to(comm.device, part.dtype), largest, placement.dim)
            for piece in _pieces(value.detach(), size, placement)
        ]
        places = {int(rank): place for place, rank in _ranks_by_place(mesh, dimension)}
        sent = [pieces[places[rank]] for rank in range(comm.world_size)]
    dist.scatter(received, sent, src=0)
    if part.numel():
        part.copy_(received.narrow(placement.dim, 0, part.shape[placement.dim]))


def _ranks_by_place(mesh: Any, dimension: int) -> Iterator[tuple[int, int]]:
    """Yield the place along the dimension, and the rank, of all processes of the mesh."""
    for place, ranks in enumerate(mesh.mesh.unbind(dimension)):
        for rank in ranks.reshape(-1).tolist():
            yield place, rank


def _sharding(parameter: Any) -> tuple[Any, int, Any]:
    """Return the mesh, the dimension of it over which the parameter is sharded, and how."""
    found = [(index, item) for index, item in enumerate(parameter.placements) if item.is_shard()]
    index, placement = found[-1]
    return parameter.device_mesh, index, placement


def _pieces(value: torch.Tensor, size: int, placement: Any) -> Iterator[torch.Tensor]:
    chunks = value.chunk(size, placement.dim)
    yield from chunks
    empty = value.narrow(placement.dim, 0, 0)
    for _ in range(size - len(chunks)):
        yield empty


def _pad(piece: torch.Tensor, shape: list[int], dim: int) -> torch.Tensor:
    if list(piece.shape) == shape:
        return piece.contiguous()
    padded = piece.new_zeros(shape)
    padded.narrow(dim, 0, piece.shape[dim]).copy_(piece)
    return padded


def _broadcast(tensor: torch.Tensor, comm: Comm) -> None:
    """Broadcast rank 0's values by way of the device of the collectives."""
    sent = tensor.detach().to(comm.device, copy=tensor.device != comm.device).contiguous()
    comm.broadcast(sent)
    if sent.data_ptr() != tensor.data_ptr():
        tensor.copy_(sent)
