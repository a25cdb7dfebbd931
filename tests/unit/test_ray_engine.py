"""What the Ray engine decides before there is a cluster; with one it is tried in tests/nodes/test_ray.py."""

from __future__ import annotations

from typing import Any

import pytest

from notebook_accel import probes
from notebook_accel.events import Failure
from notebook_accel.launch import failures
from notebook_accel.launch.engines import table
from notebook_accel.launch.engines.ray import RayEngine
from notebook_accel.launch.engines.ray_cluster import Node, capacity, wanted
from notebook_accel.launch.job import Job

NODES = [
    Node(name="a", address="10.0.0.1", resources={"CPU": 8, "GPU": 2}),
    Node(name="b", address="10.0.0.2", resources={"CPU": 3, "GPU": 4}),
    Node(name="c", address="10.0.0.3", resources={"CPU": 4}),
]


@pytest.mark.parametrize(
    ("placement", "resources", "room"),
    [
        ("PACK", {"CPU": 1}, 15),
        ("PACK", {"CPU": 1, "GPU": 1}, 5),
        ("SPREAD", {"CPU": 2, "GPU": 1}, 3),
        ("STRICT_PACK", {"CPU": 1}, 8),
        ("STRICT_SPREAD", {"CPU": 1}, 3),
        ("PACK", {"CPU": 0.1}, 150),
        ("PACK", {"TPU": 1}, 0),
    ],
)
def test_room_is_counted_node_by_node(placement: str, resources: dict[str, float], room: int) -> None:
    assert capacity(NODES, resources, placement) == room


def test_a_worker_gets_a_gpu_where_there_are_any() -> None:
    assert wanted(NODES, False, None) == {"CPU": 1, "GPU": 1}
    assert wanted(NODES, True, None) == wanted(NODES[2:], False, None) == {"CPU": 1}
    assert wanted(NODES, True, {"GPU": 2}) == {"GPU": 2}


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "is_available", lambda name: name != "ray")
    with pytest.raises(ValueError, match=r'Ray is not installed: pip install "notebook-accel\[ray\]"'):
        table.engine_for(Job(function=print, engine="ray"))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"placement": "RANDOM"}, "placement='RANDOM': choose among 'PACK'"),
        ({"resources_per_worker": {}}, "a number above 0 is needed"),
        ({"resources_per_worker": {"CPU": 0}}, "a number above 0 is needed"),
        ({"notebook_address": "here:port"}, "notebook_address='here:port': host:port is needed"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "is_available", lambda name: True)
    with pytest.raises(ValueError, match=text.replace("(", r"\(")):
        RayEngine(**arguments)


def test_a_lost_rank_says_what_became_of_it() -> None:
    error = failures.silent_end(Failure(rank=3, time=0.0, pid=77, lost="its node 10.0.0.2 died"))
    assert str(error) == "rank 3 (process 77) is lost: its node 10.0.0.2 died"
