"""What the Ray engine decides before there is a cluster; with one it is tried in tests/nodes/test_ray.py."""

from __future__ import annotations

import importlib.util
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from notebook_accel import probes, runtime
from notebook_accel.errors import LaunchError
from notebook_accel.events import Failure
from notebook_accel.launch.engines import base
from notebook_accel.launch.engines.ray import cluster
from notebook_accel.launch.engines.ray.cluster import Node, choose_resources, count_room
from notebook_accel.launch.engines.ray.engine import RayEngine
from notebook_accel.launch.transfer import failures

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
    assert count_room(NODES, resources, placement) == room


def test_a_worker_gets_a_gpu_where_there_are_any() -> None:
    assert choose_resources(NODES, False, None) == {"CPU": 1, "GPU": 1}
    assert choose_resources(NODES, True, None) == choose_resources(NODES[2:], False, None) == {"CPU": 1}
    assert choose_resources(NODES, True, {"GPU": 2}) == {"GPU": 2}


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "is_available", lambda name: name != "ray")
    with pytest.raises(ValueError, match=r'Ray is not installed: pip install "notebook-accel\[ray\]"'):
        base.find("ray")


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
    error = failures.make_exit_error(Failure(rank=3, time=0.0, pid=77, lost="its node 10.0.0.2 died"))
    assert str(error) == "rank 3 (process 77) is lost: its node 10.0.0.2 died"


SLOW = """Initialization failure from server:
Traceback (most recent call last):
  File "ray/util/client/server/proxier.py", line 780, in Datapath
    raise RuntimeError(
RuntimeError: Proxy failed to Connect to backend! Check the logs.
"""


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_a_server_that_was_too_slow_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # importing Ray sets it
    import ray

    answers: list[Exception | None] = [ConnectionAbortedError(SLOW), None]
    asked = []

    def init(address: str, **more: object) -> None:
        asked.append(address)
        if (answer := answers.pop(0)) is not None:
            raise answer

    monkeypatch.setattr(ray, "init", init)
    cluster.connect("ray://far:10001")
    assert asked == ["ray://far:10001"] * 2
    answers[:] = [ConnectionAbortedError(SLOW)] * 2
    with pytest.raises(
        LaunchError, match=r"answers there \(RuntimeError: Proxy failed to Connect to backend! Check"
    ):
        cluster.connect("ray://far:10001")
    answers[:] = [ConnectionError("ray client connection timeout")]
    monkeypatch.setenv("RAY_ADDRESS", "ray://nowhere:10001")
    with pytest.raises(
        LaunchError, match=r"^RAY_ADDRESS='ray://nowhere:10001': .*ray client connection timeout"
    ):
        cluster.connect(None)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_a_cluster_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")
    import ray

    def nodes() -> None:
        raise ConnectionError("Failed to reconnect within the reconnection grace period")

    monkeypatch.setattr(ray, "nodes", nodes)
    with pytest.raises(LaunchError, match=r"Ray does not answer any more \(Failed to reconnect"):
        cluster.list_nodes()
    steps: list[str] = []
    monkeypatch.setattr(ray.util.client, "num_connected_contexts", lambda: 1)
    monkeypatch.setattr(ray.util.client.ray, "disconnect", lambda: steps.append("disconnect"), raising=False)
    monkeypatch.setattr(ray, "init", lambda **more: steps.append("init"))
    cluster.connect("ray://far:10001")
    assert steps == ["disconnect", "init"], "Ray connects to nothing else before that"


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_a_session_keeps_its_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another address would end it."""
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")
    import ray

    class Held:
        is_over = False
        job = SimpleNamespace(engine="ray")

    session = Held()
    monkeypatch.setattr(runtime, "sessions", lambda: [weakref.ref(session)])
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    context = SimpleNamespace(namespace="notebook_accel at ray://near:10001")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    with pytest.raises(LaunchError, match="uses the Ray at 'ray://near:10001' still"):
        cluster.connect("ray://far:10001")
