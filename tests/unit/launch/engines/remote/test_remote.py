"""Simulated hosts, as the benchmark of scale has them: a launch runs, fails, loses hosts, and is shown readably."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from notebook_accel import notebook_launcher
from notebook_accel.errors import WorkerError
from notebook_accel.launch.engines.remote.pool import get_pool
from notebook_accel.widgets.run.picture import MOST_OUTPUTS, make_picture
from tests.benchmarks import bench_scale
from tests.benchmarks.simulated_engine import SimulatedEngine
from tests.benchmarks.simulated_hosts import METRICS, SimulatedCluster, simulate

NODES, RANKS = 12, 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[SimulatedCluster]:
    with simulate(1) as made:
        yield made


@pytest.fixture
def live(cluster: SimulatedCluster) -> Iterator[Any]:
    """A run whose ranks all run."""
    made = notebook_launcher(
        bench_scale.work, engine=SimulatedEngine(cluster, NODES, RANKS), block=False, view="none"
    )
    bench_scale.wait_until_running(made, NODES * RANKS)
    yield made
    made.stop(0.0)
    get_pool().close()


def test_a_run_on_simulated_hosts(cluster: SimulatedCluster, live: Any) -> None:
    while len(live.record.line_counts) < NODES * RANKS:
        live.wait(0.05)
    picture = make_picture(live)
    assert len(picture.ranks) == NODES * RANKS
    assert len(picture.outputs) < MOST_OUTPUTS and picture.hidden_outputs == NODES * RANKS - len(
        picture.outputs
    )
    assert set(live.record.metrics) == set(METRICS)
    cluster.finish(range(NODES), pickle.dumps(3))
    assert live.result() == 3


def test_a_failure_on_simulated_hosts(cluster: SimulatedCluster, live: Any) -> None:
    cluster.fail(6, 6 * RANKS)
    with pytest.raises(WorkerError, match="of rank 48") as caught:
        live.result()
    assert len(caught.value.__notes__) < NODES * RANKS, "not a line for each of very many ranks"
    assert 6 * RANKS in make_picture(live).outputs, "the lines of the one that failed are shown"


def test_simulated_hosts_that_vanish(cluster: SimulatedCluster, live: Any) -> None:
    cluster.vanish(range(4, NODES))
    with pytest.raises(WorkerError, match="is lost: host node"):
        live.result()
