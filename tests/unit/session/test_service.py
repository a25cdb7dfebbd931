"""What a worker of a session does besides calls: variables, and the end of its connections to others."""

from __future__ import annotations

import os
import select
import socket
from typing import Any

import pytest
import torch

from notebook_accel.session import service
from tests.unit.multiprocess import run_ranks


def test_variables_are_pushed_and_pulled(worker: dict[str, Any]) -> None:
    service.push({"a": 1})
    assert service.pull("a") == 1
    with pytest.raises(NameError, match="no variable 'b' on this worker; there are: a"):
        service.pull("b")


def test_connections_to_others_end_and_no_others() -> None:
    pairs = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as server:
            near = socket.create_connection(server.getsockname())
            far, _ = server.accept()
        pairs.append((near, far))
    service.close_connections_to([1])  # nobody that this process is connected to
    for near, far in pairs:
        near.sendall(b"a")
        assert far.recv(1) == b"a"
    service.close_connections_to([os.getpid()])
    for near, far in pairs:
        assert near.recv(1) == b"" and far.recv(1) == b""
        near.close()
        far.close()


def rank_0_gathers_alone() -> None:
    from notebook_accel import detect
    from notebook_accel.comm import ops, torch_dist

    comm = detect.ensure(cpu=True).comm
    assert isinstance(comm, torch_dist.TorchComm)
    for _ in range(40):
        ops.gather(comm, torch.ones(1))
    gathers = comm._gathers()
    assert gathers is not None and gathers.sockets is not None
    if comm.rank == 0:
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            ops.gather(comm, torch.ones(1))
    else:
        poll = select.poll()
        poll.register(gathers.sockets._peers[0], select.POLLIN)
        assert poll.poll(120_000)  # rank 0 has sent, and waits
        service.close_connections_to([])
    comm.close()


@pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="such sockets are of Linux")
def test_a_gather_over_sockets_ends_too() -> None:
    assert run_ranks(rank_0_gathers_alone) == [None, None]
