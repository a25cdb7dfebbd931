"""Topology from torchrun's variables."""

from __future__ import annotations

import pytest

from notebook_accel import topology
from notebook_accel.topology import Topology

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def read(monkeypatch: pytest.MonkeyPatch, **variables: int | str) -> Topology:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    return topology.from_environ()


def test_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert topology.from_environ() == Topology()
    assert topology.from_environ().is_main and topology.from_environ().is_last


def test_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    place = read(monkeypatch, RANK=1, WORLD_SIZE=4)
    assert place == Topology(rank=1, local_rank=1, world_size=4, local_world_size=4)


def test_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    place = read(monkeypatch, RANK=5, WORLD_SIZE=6, LOCAL_RANK=2, LOCAL_WORLD_SIZE=3)
    assert (place.node_rank, place.num_nodes) == (1, 2)
    assert place.is_last and not place.is_main and not place.is_local_main


@pytest.mark.parametrize(
    ("variables", "equation"),
    [
        ({"RANK": 3, "WORLD_SIZE": 2}, "RANK 3 >= WORLD_SIZE 2"),
        ({"RANK": -1, "WORLD_SIZE": 2}, "RANK -1 < 0"),
        ({"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 2}, "LOCAL_RANK 2 >= LOCAL_WORLD_SIZE 2"),
        ({"RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 3}, "LOCAL_WORLD_SIZE 3 > WORLD_SIZE 2"),
        ({"RANK": 0, "WORLD_SIZE": 0}, "WORLD_SIZE 0 < 1"),
        ({"RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "GROUP_WORLD_SIZE": 1}, "1 node x 2 processes"),
        ({"RANK": 1}, "RANK=1 is set and WORLD_SIZE is not"),
        ({"RANK": "x", "WORLD_SIZE": 1}, "RANK='x' is not an integer"),
    ],
)
def test_contradictions_show_the_equation(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, int | str], equation: str
) -> None:
    with pytest.raises(ValueError, match=equation):
        read(monkeypatch, **variables)


def test_a_group_of_another_size_overrules_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    read(monkeypatch, RANK=0, WORLD_SIZE=1)
    assert topology.from_group(1, 2) == Topology(rank=1, local_rank=1, world_size=2, local_world_size=2)
