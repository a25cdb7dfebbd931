"""Gathers of a process group that something is wrong with on one of its ranks."""

from __future__ import annotations

import functools
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from notebook_accel import Accelerator, PartialState, detect
from notebook_accel.comm import local_sockets, ops
from notebook_accel.comm.gathers import BEFORE_SOCKETS, Gathers
from notebook_accel.comm.torch_dist import TorchComm
from notebook_accel.state import AcceleratorState
from tests.ports import reserve_port
from tests.unit.clock import wait_until
from tests.unit.multiprocess import run_ranks

pytestmark = pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="such sockets are of Linux")


def begin(num_gathers: int = BEFORE_SOCKETS + 1) -> TorchComm:
    """Return the collectives of a rank after some gathers."""
    comm = detect.ensure(cpu=True).comm
    assert isinstance(comm, TorchComm)
    for _ in range(num_gathers):
        ops.gather(comm, torch.ones(1))
    return comm


def gathers_of(comm: TorchComm) -> Gathers:
    found = comm._gathers()
    assert found is not None
    return found


def sockets_of(comm: TorchComm) -> local_sockets.LocalSockets:
    found = gathers_of(comm).sockets
    assert found is not None
    return found


def check(comm: TorchComm) -> None:
    """Gather small and large tensors, which go different ways."""
    for size in (1, local_sockets.MAX_BYTES):
        found = ops.gather(comm, torch.full((size,), comm.rank))
        assert torch.equal(found, torch.arange(comm.world_size).repeat_interleave(size))


def rank_0_has_seen_a_tree() -> list[Any]:
    comm = begin(0)
    mine = 100 * comm.rank
    tree = {
        "ok": torch.tensor([True, comm.rank == 1]),
        "ids": torch.tensor([10, 11]) + mine,
        "x": torch.tensor(0.5),
    }
    if comm.rank == 0:
        with mock.patch.object(ops, "pack", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            ops.gather(comm, tree)
    return [{name: leaf.tolist() for name, leaf in ops.gather(comm, tree).items()} for _ in range(2)]


def test_ranks_pack_a_tree_alike_whatever_they_saw_before() -> None:
    expected = {"ok": [True, False, True, True], "ids": [10, 11, 110, 111], "x": [0.5, 0.5]}
    assert run_ranks(rank_0_has_seen_a_tree) == [[expected] * 2] * 2


class Tagged(torch.Tensor):
    """A tensor of a class of the user's."""


def of_dtensor(rank: int) -> torch.Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)])


ODD: dict[str, Callable[[int], torch.Tensor]] = {
    "zeros": lambda rank: torch._efficientzerotensor((2,)),
    "class": lambda rank: (torch.arange(2.0) + rank).as_subclass(Tagged),
    "dtensor": of_dtensor,
    "parameter": lambda rank: torch.nn.Parameter(torch.arange(2.0) + rank),
    "negative": lambda rank: torch._neg_view(torch.arange(2.0) + rank + 1),
}


def outcome(function: Callable[[], Any]) -> str:
    try:
        found = function()
        return f"{type(found).__name__} {found.tolist()}"
    except Exception as error:
        return f"{type(error).__name__} {str(error)[:60]}"


def ranks_gather_odd_tensors() -> list[str]:
    found = []
    comm = begin(0)
    for connects in (False, True):
        if connects:
            begin()
            sockets_of(comm)
        for name, make in ODD.items():
            found.append(f"{name}: {outcome(functools.partial(ops.gather, comm, make(comm.rank)))}")
            check(comm)
        for transform in (torch.func.grad, torch.func.vmap):
            function = transform(lambda x: (x * ops.gather(comm, x.detach()).sum()).sum())
            found.append(outcome(functools.partial(function, torch.ones(2))))
            check(comm)
        assert (gathers_of(comm).sockets is not None) == connects
    half = len(found) // 2
    assert found[:half] == found[half:]
    return found[:half]


def test_odd_tensors_are_gathered_as_without_sockets() -> None:
    for found in run_ranks(ranks_gather_odd_tensors):
        assert found[0] == "zeros: Tensor [0.0, 0.0, 0.0, 0.0]"
        assert found[1] == "class: Tagged [0.0, 1.0, 1.0, 2.0]"
        assert found[3:5] == [
            "parameter: Tensor [0.0, 1.0, 1.0, 2.0]",
            "negative: Tensor [-1.0, -2.0, -2.0, -3.0]",
        ]


def rank_0_has_an_odd_tensor() -> list[Any]:
    comm = begin()
    own = torch.arange(2.0) + comm.rank
    found = ops.gather(comm, own.as_subclass(Tagged) if comm.rank == 0 else own).tolist()
    check(comm)
    gathers = gathers_of(comm)
    if comm.rank == 0:  # rank 1 learns that this one goes over gloo, and waits there
        with mock.patch.object(gathers, "_name", "no such method"), pytest.raises(AttributeError):
            ops.gather(comm, own.as_subclass(Tagged))
    found += ops.gather(comm, own).tolist()
    check(comm)
    return list(found)


def test_one_rank_whose_tensor_is_odd_takes_all_to_gloo() -> None:
    """And what fails there on one rank is brought to its end by its next gather."""
    assert run_ranks(rank_0_has_an_odd_tensor) == [[0.0, 1.0, 1.0, 2.0] * 2] * 2


def rank_0_is_interrupted(size: int) -> list[Any]:
    comm = begin()
    sockets = sockets_of(comm)
    for step in ("_send", "_receive"):
        if comm.rank == 0:
            patch = mock.patch.object(sockets, step, side_effect=KeyboardInterrupt)
            with patch, pytest.raises(KeyboardInterrupt):
                ops.gather(comm, torch.full((size,), 5))
        else:
            found = ops.gather(comm, torch.full((size,), 6))
            assert torch.equal(found, torch.tensor([5, 6]).repeat_interleave(size))
        check(comm)
    return [ops.gather(comm, torch.tensor([10 + comm.rank])).tolist(), sockets.broken]


@pytest.mark.parametrize("size", [1, local_sockets.MAX_BYTES])
def test_a_gather_that_an_interrupt_ended_on_one_rank_leaves_ranks_in_step(size: int) -> None:
    assert run_ranks(rank_0_is_interrupted, size) == [[[10, 11], ""]] * 2


def rank_0_connects_badly(how: str) -> dict[str, int]:
    comm = begin(BEFORE_SOCKETS)
    main = threading.main_thread().ident or 0
    if comm.rank == 0 and how.startswith("interrupt"):
        real = local_sockets._has_room

        def has_room(peer: Any) -> bool:
            for _ in range(200 if how == "interrupts" else 1):
                signal.pthread_kill(main, signal.SIGINT)
                time.sleep(0.0005)
            return real(peer)

        with mock.patch.object(local_sockets, "_has_room", has_room), pytest.raises(KeyboardInterrupt):
            ops.gather(comm, torch.ones(1))
    elif comm.rank == 0:
        with mock.patch.object(local_sockets, "LocalSockets", side_effect=OSError):
            check(comm)
    if comm.rank == 1 and how == "error":
        check(comm)
    check(comm)
    return comm.count_gathers()


@pytest.mark.parametrize("how", ["interrupt", "interrupts", "error"])
def test_all_ranks_connect_or_none_does(how: str) -> None:
    for count in run_ranks(rank_0_connects_badly, how):
        assert count["sockets"] == (how != "error")


def child_gathers() -> list[Any]:
    comm = begin()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            ops.gather(comm, torch.tensor([-1]))
            os.write(writing, b"a value")
        except RuntimeError as error:
            os.write(writing, str(error).encode()[:200])
        finally:
            sockets_of(comm).shut_down()  # of the child only
            os._exit(0)
    os.waitpid(pid, 0)
    said = os.read(reading, 200).decode()
    os.close(reading)
    os.close(writing)
    return [said.split(",")[0], ops.gather(comm, torch.tensor([comm.rank])).tolist()]


def test_a_child_does_not_gather_for_its_parent() -> None:
    found = run_ranks(child_gathers, starts_others=True)
    assert found == [[f"this process was forked from rank {rank}", [0, 1]] for rank in range(2)]


def rank_0_destroys_its_group(how: str) -> str:
    comm = begin()
    if comm.rank == 0 and how == "dist":
        dist.destroy_process_group()
    elif comm.rank == 0:
        held = dist.group.WORLD  # as a model in DistributedDataParallel holds it
        PartialState().destroy_process_group()
        assert held is not None
    if comm.rank == 0:
        return ""
    try:
        ops.gather(comm, torch.ones(1))
    except RuntimeError as error:
        return str(error)
    return "a value"


@pytest.mark.parametrize("how", ["dist", "state"])
def test_after_a_rank_has_destroyed_its_group_the_others_do_not_wait(how: str) -> None:
    said = run_ranks(rank_0_destroys_its_group, how)[1]
    assert "rank 0 has left" in said or "connection to rank 0 is lost" in said


def ranks_open_another_group(port: int) -> list[Any]:
    dist.init_process_group("gloo")
    accelerator = Accelerator(cpu=True)
    comm = accelerator._runtime.comm
    assert isinstance(comm, TorchComm)
    begin()
    sockets = weakref.ref(sockets_of(comm))
    comm.barrier()
    dist.destroy_process_group()
    wait_until(lambda: sockets() is None)  # the thread that has connected them may be on its way out still
    with pytest.raises(RuntimeError, match="init_process_group"):
        comm.barrier()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=comm.rank, world_size=2)
    found = [accelerator.gather(torch.tensor([comm.rank])).tolist()]
    begin()
    sockets_of(comm)
    check(comm)
    comm.barrier()
    dist.destroy_process_group()
    return found


def test_an_accelerator_goes_on_in_the_next_group() -> None:
    with reserve_port() as port:
        assert run_ranks(ranks_open_another_group, port) == [[[0, 1]]] * 2


def rank_0_resets(num_gathers: int) -> list[int]:
    comm = begin(num_gathers)
    if comm.rank == 0:
        AcceleratorState._reset_state(True)
        PartialState(cpu=True)
        comm = begin(0)
    found = ops.gather(comm, torch.tensor([comm.rank])).tolist()
    for _ in range(BEFORE_SOCKETS + 2):
        check(comm)
    return list(found)


@pytest.mark.parametrize("num_gathers", [5, BEFORE_SOCKETS + 5])
def test_a_reset_on_one_rank_changes_no_way(num_gathers: int) -> None:
    assert run_ranks(rank_0_resets, num_gathers) == [[0, 1]] * 2


def handler_gathers() -> str:
    comm = begin()
    said: list[str] = []
    if comm.rank == 0:
        sockets = sockets_of(comm)
        real = sockets._receive

        def handle(*_: Any) -> None:
            with pytest.raises(RuntimeError) as caught:
                ops.gather(comm, torch.ones(1))
            said.append(str(caught.value))

        def receive(*args: Any) -> int:
            if not said:
                signal.raise_signal(signal.SIGUSR1)
            return real(*args)

        signal.signal(signal.SIGUSR1, handle)
        with mock.patch.object(sockets, "_receive", receive):
            check(comm)
    else:
        check(comm)
    check(comm)
    return "".join(said)


def test_a_gather_in_a_signal_handler_raises_while_its_thread_gathers() -> None:
    said = run_ranks(handler_gathers)
    assert "while this thread waits in another one" in said[0] and not said[1]


def ranks_compile() -> list[float]:
    comm = begin(BEFORE_SOCKETS)

    def step(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = ops.gather(comm, x * 2) + 1
        return found

    compiled = torch.compile(step, backend="eager") if comm.rank == 0 else step
    found = [compiled(torch.tensor([float(number + comm.rank)])) for number in range(3)]
    sockets_of(comm)
    return [value for part in found for value in part.tolist()]


def test_ranks_gather_in_compiled_functions_as_others_do() -> None:
    assert run_ranks(ranks_compile) == [[1.0, 3.0, 3.0, 5.0, 5.0, 7.0]] * 2
