"""Which metrics a rank sends to the notebook."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from notebook_accel.launch.worker import metrics_reporter
from notebook_accel.launch.worker.metrics_reporter import WorkerReporter
from notebook_accel.stopping import StopPoint
from notebook_accel.stream.series import MOST_MEASURED
from notebook_accel.topology import Topology


class Sent:
    """Stands for the emitter of a rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.events: list[Any] = []

    def now(self) -> float:
        return 0.0

    def emit(self, event: Any) -> None:
        self.events.append(event)


def report(rank: int, world: int, *, per_node: int | None = None, one_launcher: bool = True) -> Any:
    """Return a reporter of a rank, and what it has sent."""
    local = per_node or world
    place = Topology(
        rank=rank,
        world_size=world,
        local_rank=rank % local,
        local_world_size=local,
        node_rank=rank // local,
        num_nodes=world // local,
    )
    sent = Sent(rank)
    made = WorkerReporter(sent, lambda: None, StopPoint(), place, has_all_nodes=one_launcher)  # type: ignore[arg-type]
    return made, sent.events


def log(reporter: Any, values: dict[str, float], step: int) -> None:
    if reporter.takes_metrics(values):
        reporter.metrics(values, step)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The time that reporters see; it goes on where the test says so."""
    now = [1_000.0]
    monkeypatch.setattr(metrics_reporter, "monotonic", lambda: now[0])
    yield now


@pytest.mark.parametrize("world", [1, 2, 64, 65, 200, 8_192])
def test_so_many_ranks_send_as_the_notebook_keeps_spread_over_all(world: int) -> None:
    stride = math.ceil(world / MOST_MEASURED)
    sending = [rank for rank in range(world) if report(rank, world)[0].takes_metrics(["loss"])]
    assert sending == list(range(0, world, stride)) and len(sending) <= MOST_MEASURED
    assert len(sending) > MOST_MEASURED / 2 or stride == 1


def test_what_counts_is_how_many_ranks_a_notebook_has() -> None:
    """With a notebook on each node, each has the metrics of its own."""
    for rank in (8, 9, 1_023):
        assert report(rank, 1_024, per_node=8, one_launcher=False)[0].takes_metrics(["loss"])
    assert not report(9, 1_024, per_node=8)[0].takes_metrics(["loss"])


def test_a_rank_that_is_not_measured_sends_nothing() -> None:
    reporter, events = report(1, 128)
    log(reporter, {"loss": 1.0}, 1)
    assert events == []


def test_other_ranks_send_what_the_notebook_can_take(clock: list[float]) -> None:
    reporter, events = report(1, 2)
    for step in range(2_000):
        log(reporter, {"loss": float(step)}, step)
    assert [event.step for event in events] == list(range(500))
    for step in range(2_000, 2_200):
        clock[0] += 0.0625
        log(reporter, {"loss": float(step)}, step)
    assert [event.step for event in events[500:]] == list(range(2_001, 2_200, 2)), "ten a second"
    log(reporter, {"eval_loss": 1.0}, 4_000)
    assert events[-1].values == {"eval_loss": 1.0}, "what comes seldom is not lost among what comes often"


@pytest.mark.parametrize(("rank", "one_launcher"), [(0, True), (2, False)])
def test_the_first_rank_of_a_notebook_sends_everything(
    clock: list[float], rank: int, one_launcher: bool
) -> None:
    reporter, events = report(rank, 4, per_node=2, one_launcher=one_launcher)
    for step in range(2_000):
        log(reporter, {"loss": float(step)}, step)
    assert len(events) == 2_000


def test_names_that_are_always_new_count_as_the_same(clock: list[float]) -> None:
    reporter, events = report(1, 2)
    for step in range(2_000):
        log(reporter, {f"loss of step {step}": 1.0}, step)
    assert len(events) == 100 + 500
