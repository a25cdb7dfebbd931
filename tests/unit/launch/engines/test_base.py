"""Engines by name."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest

from notebook_accel.events import Phase
from notebook_accel.launch import preflight
from notebook_accel.launch.engines import base
from notebook_accel.launch.engines.base import Engine, Outcome
from notebook_accel.launch.job import Job
from notebook_accel.launch.request import LaunchRequest
from notebook_accel.stream.record import RunRecord


class Foreign(Engine):
    name = "foreign"
    on_this_node = False

    def count(self, options: Any, kind: object) -> int:
        return 12

    def problems(self, job: Job) -> list[str]:
        return ["the cluster sleeps"] if job.address == "asleep" else []

    def run(self, *args: Any) -> Outcome:
        raise NotImplementedError


class Spawning(Foreign):
    start_methods = ("spawn",)


def entries(monkeypatch: pytest.MonkeyPatch, **named: str) -> None:
    found = [metadata.EntryPoint(name, value, base.GROUP) for name, value in named.items()]
    monkeypatch.setattr(metadata, "entry_points", lambda group: found if group == base.GROUP else [])


def test_a_package_can_add_one(monkeypatch: pytest.MonkeyPatch) -> None:
    entries(monkeypatch, foreign=f"{__name__}:Foreign")
    monkeypatch.setattr(metadata.EntryPoint, "load", lambda entry: Foreign)
    assert "foreign" in base.names()
    ready, engine = preflight.check(
        LaunchRequest(function=print, options={"engine": "foreign", "address": "there"}), "test"
    )
    assert isinstance(engine, Foreign) and ready.engine == "foreign"
    assert ready.local_world_size == 12, "more than this machine's devices"
    assert ready.distributed
    with pytest.raises(ValueError, match="test: the cluster sleeps"):
        preflight.check(
            LaunchRequest(function=print, options={"engine": "foreign", "address": "asleep"}), "test"
        )


def test_an_interrupt_before_the_first_worker_does_not_speak_of_workers_that_ended() -> None:
    """Waiting for a cluster or for a host is most of a launch there."""
    job, _ = preflight.check(LaunchRequest(function=print, options={"engine": Foreign()}), "test")
    record = RunRecord()
    record.apply(Phase(rank=-1, time=0.0, name="queued"))
    assert Foreign().describe_interrupt(job, record) == "print: no worker was started yet"
    record.apply(Phase(rank=3, time=0.0, name="starting"))
    assert Foreign().describe_interrupt(job, record) == "print: all workers have ended"
    record.apply(Phase(rank=-1, time=0.0, name="restarting"))
    assert Foreign().describe_interrupt(job, record) == "print: all workers have ended"


def test_an_engine_itself_can_be_given() -> None:
    engine = Foreign()
    assert preflight.check(LaunchRequest(function=print, options={"engine": engine}), "test")[1] is engine


def test_a_name_that_is_none_gets_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"engine='lokal': choose among 'auto', .*did you mean 'local'"):
        preflight.check(LaunchRequest(function=print, options={"engine": "lokal"}), "test")
    with pytest.raises(TypeError, match="engine=7: the name of an engine is needed"):
        preflight.check(LaunchRequest(function=print, options={"engine": 7}), "test")
    entries(monkeypatch, gone="no_such_module:Engine", odd="builtins:dict")
    with pytest.raises(ValueError, match=r"no_such_module:Engine cannot be used: ModuleNotFoundError"):
        base.find("gone")
    with pytest.raises(ValueError, match=r"builtins:dict makes no Engine, but \{\}"):
        base.find("odd")


def test_what_it_knows_decides() -> None:
    with pytest.raises(ValueError, match="num_processes=2 with engine='inprocess'"):
        preflight.check(
            LaunchRequest(function=print, options={"engine": "inprocess", "num_processes": 2}), "test"
        )
    with pytest.raises(
        ValueError, match="start_method='fork' with engine='foreign': it supports 'auto', 'spawn'"
    ):
        preflight.check(
            LaunchRequest(function=print, options={"engine": Spawning(), "start_method": "fork"}), "test"
        )


def test_files_of_output_need_workers(tmp_path: Any) -> None:
    assert preflight.check(
        LaunchRequest(function=print, options={"num_processes": 1, "log_dir": tmp_path}), "test"
    )[0].distributed
