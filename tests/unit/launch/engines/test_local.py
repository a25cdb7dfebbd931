"""What processes of this machine need of this one, and give back."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import psutil

from notebook_accel.launch.engines.local import LocalEngine
from notebook_accel.launch.supervise.control import Control
from notebook_accel.launch.supervise.worker_group import Attempt
from notebook_accel.stream.record import RunRecord
from tests.unit.jobs import make_job


def find_ports() -> set[int]:
    """Return at which ports this process listens."""
    own: Any = psutil.Process()
    listed = own.net_connections if hasattr(own, "net_connections") else own.connections  # psutil before 6
    return {each.laddr.port for each in listed(kind="inet") if each.status == psutil.CONN_LISTEN}


def test_each_attempt_has_a_store_and_none_outlives_the_run() -> None:
    """Also where somebody keeps the error of the run, and with it the plan."""
    job = replace(make_job(os.getpid), start_method="fresh")
    engine, before = LocalEngine(), find_ports()
    with engine.plan(job) as plan:
        for number in range(2):
            attempt = Attempt(
                job=job, record=RunRecord(), deliver=lambda events: None, control=Control(), number=number
            )
            group = engine.make_group(plan, attempt)
            assert plan.store is not None
            assert find_ports() - before == {plan.store.port}
            group.close()
    assert find_ports() <= before and plan.store is None
