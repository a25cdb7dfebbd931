"""The end of a launch under Ray, without a cluster; with one it is tried in tests/nodes/test_ray.py."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest

from notebook_accel.launch.engines.ray import cluster
from notebook_accel.launch.engines.ray.actor import ActorInfo, ProcessStart
from notebook_accel.launch.engines.ray.ray_group import Plan, RayWorkerGroup, _RayMember
from notebook_accel.launch.supervise.control import Control
from notebook_accel.launch.supervise.worker_group import Attempt
from notebook_accel.stream.record import RunRecord
from tests.unit.jobs import make_job


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_actors_of_ended_ranks_first_end_what_these_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # importing Ray sets it
    import ray

    steps: list[object] = []
    monkeypatch.setattr(cluster, "is_up", lambda: True)
    monkeypatch.setattr(ray, "kill", lambda actor: steps.append(("kill", actor)))
    monkeypatch.setattr(ray, "wait", lambda works, **how: steps.append(("wait", works, how["num_returns"])))
    start = ProcessStart(variables={}, directory="", path=[], with_ipython=False)
    plan = Plan(
        resources={},
        placement="",
        runtime_env=None,
        timeout=0,
        endpoint=None,
        payload=None,
        notes=b"",
        start=start,
    )
    attempt = Attempt(
        job=make_job(os.getpid), record=RunRecord(), deliver=lambda events: None, control=Control()
    )
    group = RayWorkerGroup(attempt, plan)
    info = ActorInfo(node="", address="", machine="", port=0, version="")
    ends: list[dict[str, Any]] = [{"work": "ended", "has_ended": True}, {"work": "runs"}, {"has_ended": True}]
    group._members = [_RayMember(rank=rank, actor="", info=info, **end) for rank, end in enumerate(ends)]
    group._actors = ["first", "second"]
    group.close()
    assert steps == [("wait", ["ended"], 1), ("kill", "first"), ("kill", "second")]
