"""What is told where the node that holds the store is lost."""

from __future__ import annotations

import sys

import pytest
from torch.distributed import DistNetworkError

from notebook_accel import LaunchError
from notebook_accel.launch.engines.nodes.meeting import NodeRendezvous
from notebook_accel.launch.engines.nodes.node_info import NodeInfo, Roster
from notebook_accel.launch.job import Rendezvous
from tests.unit.jobs import make_job


def _own_rank() -> str | None:
    import os

    return os.environ.get("RANK")


def test_a_store_that_is_lost_while_its_port_is_asked_for_is_a_sentence(port: int) -> None:
    place = Rendezvous(address="127.0.0.1", port=port, num_nodes=2, node_rank=1)
    nodes = NodeRendezvous(make_job(_own_rank, distributed=True, rendezvous=place))
    infos = [NodeInfo(node_rank=rank, host=f"gpu{rank}", processes=1) for rank in range(2)]
    nodes._roster = Roster(node_rank=1, host_rank=0, nodes=infos, addresses=["127.0.0.1"] * 2)

    class Lost:
        def check(self, names: list[str]) -> bool:
            raise DistNetworkError("Broken pipe\nframe #0: main")

    nodes._store = Lost()  # type: ignore[assignment]
    with pytest.raises(LaunchError) as caught:
        nodes._open_for_workers()
    assert str(caught.value).startswith(
        f"node 0 (gpu0) at 127.0.0.1:{port}, which holds the run together, is"
    )
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == ["torch says: Broken pipe"]
