"""What tests of nodes run on: network namespaces with kernels, a SLURM, hosts that are reached by ssh."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.nodes.network import Network, Nodes, why_not
from tests.nodes.slurm_cluster import SlurmCluster, keep_idle, make_cluster, why_no_cluster
from tests.nodes.ssh_hosts import SshHosts, make_hosts, why_no_hosts
from tests.notebooks.kernel import make_event_loop

COUNT = 3


@pytest.fixture(scope="session", autouse=True)
def _event_loop() -> None:
    make_event_loop()


@pytest.fixture(scope="session")
def network() -> Iterator[Network]:
    """Three namespaces, removed afterwards."""
    if reason := why_not():
        pytest.skip(reason)
    made = Network([f"na{os.getpid()}n{node}" for node in range(COUNT)], f"na{os.getpid()}br")
    try:
        made.make()
        yield made
    finally:
        made.remove()


@pytest.fixture(scope="module")
def nodes(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """The kernels that the tests of a module share."""
    make_event_loop()
    started = Nodes(network, tmp_path_factory.mktemp("nodes"))
    started.start(COUNT)
    yield started
    started.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A SLURM of two nodes."""
    if reason := why_no_cluster():
        pytest.skip(reason)
    with make_cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture
def idle(cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """The cluster, without any job before and after the test."""
    with keep_idle(cluster):
        yield cluster


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    """Two hosts that are reached by ssh."""
    if reason := why_no_hosts():
        pytest.skip(reason)
    with make_hosts(tmp_path_factory.mktemp("hosts")) as made:
        yield made
