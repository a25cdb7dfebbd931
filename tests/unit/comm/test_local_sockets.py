"""Small messages over sockets between ranks of one machine."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from notebook_accel.comm import local_sockets, ops, torch_dist
from notebook_accel.comm.local_sockets import LocalSockets
from tests.ports import reserve_port
from tests.unit.clock import PATIENCE_S
from tests.unit.multiprocess import run_ranks

pytestmark = pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="such sockets are of Linux")


class Meeting:
    """Gathers objects of threads."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size)
        self.objects: list[Any] = [None] * world_size

    def gather_of(self, rank: int) -> Callable[[Any], list[Any]]:
        def gather(obj: Any) -> list[Any]:
            self.objects[rank] = obj
            self.barrier.wait(PATIENCE_S)
            found = list(self.objects)
            self.barrier.wait(PATIENCE_S)
            return found

        return gather


def in_threads(world_size: int, function: Callable[[int], Any]) -> list[Any]:
    """Return what the function returned or raised for each rank."""
    results: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
    return results


@contextlib.contextmanager
def connected(world_size: int, timeout_s: float = PATIENCE_S) -> Iterator[list[LocalSockets]]:
    meeting = Meeting(world_size)
    ranks = in_threads(
        world_size,
        lambda rank: local_sockets.connect(rank, world_size, meeting.gather_of(rank), timeout_s),
    )
    try:
        yield ranks
    finally:
        for rank in filter(None, ranks):
            rank.close()


def gather(sockets: LocalSockets, world_size: int, own: torch.Tensor) -> torch.Tensor:
    if sockets.pending is not None:
        assert sockets.finish()
    target = torch.full((world_size, *own.shape), -1, dtype=own.dtype)
    assert sockets.exchange(own.data_ptr(), own.nbytes, target.data_ptr(), (own, target))
    return target


def wait_for_packet(sockets: LocalSockets) -> None:
    """Wait until the first other rank has sent something that this one has not read."""
    poll = select.poll()
    poll.register(next(iter(sockets._peers.values())), select.POLLIN)
    assert poll.poll(PATIENCE_S * 1000)


@pytest.mark.parametrize("world_size", [2, 3, local_sockets.MAX_RANKS])
def test_all_ranks_get_all_messages(world_size: int) -> None:
    with connected(world_size) as ranks:
        for number in range(20):
            size = (0, 1, 7, local_sockets.MAX_BYTES // 8)[number % 4]

            def run(rank: int, size: int = size, number: int = number) -> torch.Tensor:
                return gather(ranks[rank], world_size, torch.full((size,), 100 * number + rank))

            expected = torch.stack([torch.full((size,), 100 * number + rank) for rank in range(world_size)])
            for found in in_threads(world_size, run):
                assert torch.equal(found, expected)


def test_sizes_that_differ_are_named_on_both_ranks() -> None:
    with connected(2) as ranks:
        found = in_threads(2, lambda rank: gather(ranks[rank], 2, torch.zeros(2 + rank)))
    assert "rank 1 gathers 12 bytes, this rank 0 8" in str(found[0])
    assert "rank 0 gathers 8 bytes, this rank 1 12" in str(found[1])


def test_a_rank_that_has_left_is_named() -> None:
    with connected(3) as ranks:
        ranks[1].close()
        found = in_threads(3, lambda rank: None if rank == 1 else gather(ranks[rank], 3, torch.zeros(1)))
    for error in (found[0], found[2]):
        assert isinstance(error, RuntimeError)
        assert re.findall(r"rank \d", str(error))[-1] == "rank 1", error
        # by which a launch knows that another rank failed first
        assert any(text in str(error) for text in ("Connection closed by peer", "Broken pipe"))


@pytest.mark.parametrize("first", [0, 2])
def test_a_rank_that_has_left_is_named_also_after_others_have_ended_for_it(first: int) -> None:
    with connected(3) as ranks:
        ranks[1].close()
        with pytest.raises(RuntimeError, match="rank 1"):
            gather(ranks[first], 3, torch.zeros(1))
        with pytest.raises(RuntimeError, match=r"rank 1\b[^0-9]*$") as caught:
            gather(ranks[2 - first], 3, torch.zeros(1))
    assert any(text in str(caught.value) for text in ("Connection closed by peer", "Broken pipe"))


def test_who_was_forked_reads_no_message_of_its_parent() -> None:
    """Also after an interrupt has left a gather whose end the next one brings."""
    with connected(2) as ranks:
        with (
            mock.patch.object(ranks[0], "_receive", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            gather(ranks[0], 2, torch.zeros(1))
        late = in_threads(2, lambda rank: gather(ranks[1], 2, torch.ones(1)) if rank else None)[1]
        assert late.tolist() == [[0], [1]]
        pid = os.fork()
        if pid == 0:
            try:
                ranks[0].finish()
            except RuntimeError as error:
                os._exit(3 if "forked from rank 0" in str(error) else 4)
            finally:
                os._exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
        assert ranks[0].finish()


def test_ranks_may_wait_for_months() -> None:
    """Longer than the system counts in milliseconds."""
    with connected(2, timeout_s=1e10) as ranks:
        pending = mock.Mock(deadline=None)
        ranks[0]._wait(pending, 1, ranks[0]._peers[1], for_room=True)
        assert pending.deadline > 1e9


def test_without_room_for_messages_no_rank_connects() -> None:
    with mock.patch.object(local_sockets, "_SEND_BUFFER", 1 << 30), connected(2) as ranks:
        assert ranks == [None, None]


def test_a_rank_that_does_not_come_is_named() -> None:
    with connected(2, timeout_s=0.2) as ranks, pytest.raises(RuntimeError, match=r"0\.2 s for rank 1"):
        gather(ranks[0], 2, torch.zeros(1))


def test_signals_do_not_lengthen_the_wait() -> None:
    """A handler that runs now and then, as that of a heartbeat, does not begin the wait anew."""
    with connected(2, timeout_s=0.3) as ranks:
        calls = itertools.count()

        def handle(*_: Any) -> None:
            if next(calls) == 200:  # it would never end
                ranks[0].shut_down()

        before = signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        try:
            with pytest.raises(RuntimeError, match="Timed out"):
                gather(ranks[0], 2, torch.zeros(1))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def test_after_an_interrupt_the_next_gather_is_right() -> None:
    """Rank 0 is interrupted while it waits; what rank 1 sends for that gather is not taken for the next one's."""
    with connected(2) as ranks:

        def interrupt() -> None:
            wait_for_packet(ranks[1])  # rank 0 has sent, and waits
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            gather(ranks[0], 2, torch.tensor([1]))
        thread.join()
        late = gather(ranks[1], 2, torch.tensor([2]))
        assert late.tolist() == [[1], [2]]
        found = in_threads(2, lambda rank: gather(ranks[rank], 2, torch.tensor([10 + rank])))
        assert [rows.tolist() for rows in found] == [[[10], [11]]] * 2


def test_ranks_that_lost_count_of_each_other_raise() -> None:
    with connected(2) as ranks:
        ranks[1].num_exchanges = 4
        found = in_threads(
            2, lambda rank: gather(ranks[rank], 2, torch.zeros(1)) if rank == 0 else send(ranks[1])
        )
        again = in_threads(2, lambda rank: gather(ranks[rank], 2, torch.zeros(1)))
    assert "rank 1 is at gather 5, this rank 0 at 1" in str(found[0])
    assert all("cannot gather any more, because" in str(error) for error in again)
    assert "rank 1 is at gather 5" in str(again[0])


def send(sockets: LocalSockets) -> None:
    with contextlib.suppress(RuntimeError):
        gather(sockets, 2, torch.zeros(1))


def test_an_odd_message_decides_for_all_ranks() -> None:
    with connected(3) as ranks:

        def run(rank: int, sizes: tuple[int, ...]) -> bool:
            own, target = torch.zeros(2), torch.zeros(6)
            found = ranks[rank].exchange(own.data_ptr(), sizes[rank], target.data_ptr())
            ranks[rank].settle()
            return found

        for sizes in ((8, local_sockets.OVER_GROUP, 8), (8, 8, local_sockets.OVER_GROUP)):
            assert in_threads(3, functools.partial(run, sizes=sizes)) == [False] * 3
        errors = in_threads(3, functools.partial(run, sizes=(8, 4, local_sockets.OVER_GROUP)))
        assert in_threads(3, functools.partial(run, sizes=(8, 8, 8))) == [True] * 3
    assert ["gathers 4 bytes" in str(error) or "gathers 8 bytes" in str(error) for error in errors] == [
        True
    ] * 3


@pytest.mark.parametrize(
    "what",
    [
        "no sockets",
        "no connection",
        "another user calls",
        "another user listens",
        "another run",
        "two machines",
    ],
)
def test_all_ranks_get_sockets_or_none_does(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(os.listdir("/proc/self/fd"))
    real_listen, real_call = local_sockets._listen, local_sockets._call
    listeners = itertools.count()

    @contextlib.contextmanager
    def listen(backlog: int) -> Iterator[socket.socket | None]:
        with real_listen(backlog) as listener:
            yield None if next(listeners) == 1 else listener

    def call(address: Any, rank: int) -> socket.socket:
        if rank == 2:
            raise ConnectionRefusedError
        return real_call(address, rank)

    if what == "no sockets":
        monkeypatch.setattr(local_sockets, "_listen", listen)
    elif what == "no connection":
        monkeypatch.setattr(local_sockets, "_call", call)
    elif what == "another run":
        monkeypatch.setattr(
            local_sockets, "_call", lambda address, rank: real_call(address._replace(token=bytes(16)), rank)
        )
    elif what == "two machines":
        machines = itertools.count()
        monkeypatch.setattr(os, "readlink", lambda path: f"net:[{next(machines) // 2}]")
    else:
        end = "_accept" if what == "another user calls" else "_call"
        real_is_own = local_sockets._is_own
        monkeypatch.setattr(
            local_sockets,
            "_is_own",
            lambda peer: sys._getframe(1).f_code.co_name != end and real_is_own(peer),
        )
    monkeypatch.setattr(local_sockets, "_SETUP_S", 1.0)  # for who waits for a call that is refused
    meeting = Meeting(3)
    found = in_threads(3, lambda rank: local_sockets.connect(rank, 3, meeting.gather_of(rank), 5.0))
    assert found == [None] * 3
    assert set(os.listdir("/proc/self/fd")) == before


def ranks_gather_often() -> dict[str, Any]:
    from notebook_accel import detect

    comm = detect.ensure(cpu=True).comm
    assert isinstance(comm, torch_dist.TorchComm)
    rank, world = comm.rank, comm.world_size
    wide = torch.arange(12.0).reshape(3, 4) + rank
    cases = [
        wide.t(),
        (wide + 1j).conj().imag,
        wide.bool(),
        wide.to(torch.bfloat16).requires_grad_(),
        wide.to(torch.complex64),
        torch.zeros(0, 3),
        torch.full((local_sockets.MAX_BYTES,), rank),
        torch.tensor(rank),
    ]
    begun = torch_dist.count_collectives(comm)
    for number in range(60):
        own = cases[number % len(cases)]
        rows = comm.all_gather_object(
            own.detach().resolve_neg().numpy() if own.dtype != torch.bfloat16 else own.tolist()
        )
        found = ops.gather(comm, own)
        expected = torch.cat(
            [torch.as_tensor(row, dtype=own.dtype).reshape(-1, *own.shape[1:]) for row in rows]
        )
        assert found.dtype == own.dtype and not found.requires_grad
        assert torch.equal(found, expected) and len(found) == world * (len(own) if own.ndim else 1), number
    wides = [torch.arange(12.0).reshape(3, 4) + other for other in range(world)]
    strided = comm.all_gather(wide.t())
    assert torch.equal(strided, torch.cat([other.t() for other in wides]))
    expected = torch.cat(wides)
    assert torch.equal(comm.all_gather(torch._neg_view(wide)), -expected)
    with_grad = comm.all_gather(wide.clone().requires_grad_())
    assert torch.equal(with_grad, expected) and not with_grad.requires_grad
    with torch.inference_mode():
        assert torch.equal(comm.all_gather(wide * 2), expected * 2)
    ended = torch_dist.count_collectives(comm)
    assert begun is not None and ended is not None
    comm.close()
    return {name: ended[name] - begun[name] for name in ("gathers", "sockets", "gathers over sockets")}


@pytest.mark.parametrize("world_size", [2, 3])
def test_gathers_of_ranks(world_size: int) -> None:
    found = run_ranks(ranks_gather_often, world_size=world_size)
    # of 64 messages, 31 come before there are sockets
    assert found == [{"gathers": 31, "sockets": 1, "gathers over sockets": 33}] * world_size


def ranks_gather_other_sizes() -> str:
    from notebook_accel import detect

    comm = detect.ensure(cpu=True).comm
    for number in range(40):
        size = (1, local_sockets.MAX_BYTES)[number == 3]
        assert len(ops.gather(comm, torch.zeros(size))) == 2 * size
    number = local_sockets.MAX_BYTES // 4 + comm.rank
    with pytest.raises(RuntimeError, match="of the same shape") as caught:
        ops.gather(comm, torch.zeros(number))
    assert ops.gather(comm, torch.tensor([comm.rank])).tolist() == [0, 1]
    comm.close()
    return str(caught.value).split(":")[0]


def test_a_size_that_differs_raises_where_one_is_too_large_for_sockets() -> None:
    small, large = local_sockets.MAX_BYTES, local_sockets.MAX_BYTES + 4
    assert run_ranks(ranks_gather_other_sizes) == [
        f"rank 1 gathers {large} bytes, this rank 0 {small}",
        f"rank 0 gathers {small} bytes, this rank 1 {large}",
    ]


def ranks_meet_again(ports: list[int]) -> list[Any]:
    from notebook_accel import detect

    found = []
    for port in ports:
        comm = detect.ensure(cpu=True).comm
        assert isinstance(comm, torch_dist.TorchComm)
        for number in range(40):
            gathered = ops.gather(comm, torch.tensor([number + comm.rank]))
            assert gathered.tolist() == [number, number + 1]
        gathers = comm._gathers()
        assert gathers is not None
        sockets = gathers.sockets
        assert sockets is not None
        comm.all_gather_object(None)
        detect.renew(port)
        found.append([peer.fileno() for peer in sockets._peers.values()])
    torch_dist.close_group()
    return found


def test_ranks_that_meet_again_connect_again() -> None:
    """As the ranks of a session do after an interrupt that has left some of them in a collective."""
    with reserve_port() as first, reserve_port() as second:
        assert run_ranks(ranks_meet_again, [first, second]) == [[[-1], [-1]]] * 2


def main_process_closes() -> list[int]:
    from notebook_accel import detect

    dist.init_process_group("gloo")
    comm = detect.ensure(cpu=True).comm
    for number in range(40):
        if number == 36 and comm.rank == 0:
            comm.close()
        gathered = ops.gather(comm, torch.tensor([comm.rank]))
    dist.destroy_process_group()
    return list(gathered.tolist())


def test_a_close_on_one_rank_leaves_the_way_of_gathers_where_the_group_is_the_users() -> None:
    assert run_ranks(main_process_closes) == [[0, 1]] * 2


def ranks_gather_in_detail() -> dict[str, int]:
    from notebook_accel import detect

    dist.set_debug_level(dist.DebugLevel.DETAIL)  # torch reads its variable at import
    comm = detect.ensure(cpu=True).comm
    assert isinstance(comm, torch_dist.TorchComm)
    for _ in range(33):
        ops.gather(comm, torch.tensor([comm.rank]))
    return comm.count_gathers()


def test_gathers_stay_where_torch_compares_collectives() -> None:
    found = run_ranks(ranks_gather_in_detail)
    assert [counts["sockets"] for counts in found] == [0, 0]


def test_shut_sockets_end_the_wait_of_a_thread() -> None:
    with connected(2) as ranks:

        def run(rank: int) -> torch.Tensor | None:
            if rank == 0:
                return gather(ranks[0], 2, torch.zeros(1))
            wait_for_packet(ranks[1])
            ranks[0].shut_down()
            return None

        assert "Connection closed by peer" in str(in_threads(2, run)[0])
