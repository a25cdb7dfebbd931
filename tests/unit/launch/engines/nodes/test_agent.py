"""What an agent of torch elastic does beside starting workers."""

from __future__ import annotations

import logging
import socket
import sys

import pytest
from torch.distributed import DistNetworkError
from torch.distributed.elastic import events

from notebook_accel import LaunchError, notebook_launcher
from notebook_accel.launch.engines.nodes import agent
from notebook_accel.launch.engines.nodes.meeting import NodeRendezvous
from notebook_accel.launch.engines.nodes.node_info import NodeInfo, Roster
from notebook_accel.launch.job import Rendezvous
from tests.unit.jobs import make_job


def _own_rank() -> str | None:
    import os

    return os.environ.get("RANK")


def test_no_event_is_written_that_nobody_reads(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Each would be made of the machine's name, which a name server may take seconds to tell."""
    asked: list[str] = []
    monkeypatch.setattr(socket, "getfqdn", lambda name="": asked.append(name) or "host")
    written: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: written.append(record.getMessage()))
    logger = events._get_or_create_logger("null")
    logger.addHandler(handler)
    try:
        found = notebook_launcher(
            _own_rank,
            num_processes=2,
            num_nodes="1:2",
            rdzv_backend="c10d",
            rdzv_endpoint=f"127.0.0.1:{port}",
            view="none",
            returns="all",
        )
        assert found == ["0", "1"]
    finally:
        logger.removeHandler(handler)
    assert not asked and not "".join(written)


def test_a_store_that_is_lost_while_ranks_are_given_out_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    """Torch's agent asks it, and lets its own errors through."""
    place = Rendezvous(address="127.0.0.1", port=port, num_nodes=2, node_rank=1)
    handler = NodeRendezvous(make_job(_own_rank, distributed=True, rendezvous=place))
    nodes = [NodeInfo(node_rank=rank, host=f"gpu{rank}", processes=1) for rank in range(2)]
    handler._roster = Roster(node_rank=1, host_rank=0, nodes=nodes, addresses=["127.0.0.1"] * 2)
    led = agent._Agent.__new__(agent._Agent)
    led._handler = handler

    def lose(self: object) -> None:
        raise DistNetworkError("Broken pipe\nframe #0: main")

    monkeypatch.setattr(agent._Agent, "run", lose)
    with pytest.raises(LaunchError) as caught:
        led.run_attempts()
    assert str(caught.value).startswith(
        f"node 0 (gpu0) at 127.0.0.1:{port}, which holds the run together, is"
    )
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == ["torch says: Broken pipe"]
