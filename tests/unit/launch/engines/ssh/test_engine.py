"""Launches by ssh with a client that only runs its last word here; real ones are in tests/nodes/test_ssh.py."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from notebook_accel import notebook_launcher, runtime
from notebook_accel.errors import WorkerKilledError
from notebook_accel.launch.engines.remote import link as links
from notebook_accel.launch.engines.ssh.engine import SshEngine

CLIENT = """#!/bin/sh
for word; do case $word in down) echo "ssh: connect to host down port 22: Connection refused" >&2; exit 255;; esac; done
echo "a banner"
cd /
export SSH_CONNECTION="127.0.0.1 1 127.0.0.1 22"
eval "exec sh -c $(printf %s "$word" | sed 's/^exec sh -c //')"
"""
CPU = {"ACCELERATE_USE_CPU": "true"}


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshEngine]:
    """An engine with two hosts that are this machine."""
    monkeypatch.setattr(links, "SILENCE_SECONDS", 60.0)  # they may be busy
    client = tmp_path / "ssh"
    client.write_text(CLIENT)
    client.chmod(0o755)
    yield SshEngine(["one", "two"], ssh=str(client), python=sys.executable)
    for pool in runtime.connections():
        pool.close()


def launch(function: Any, engine: SshEngine, *args: Any, **more: Any) -> Any:
    return notebook_launcher(function, args, engine=engine, view="none", environment=CPU, **more)


def test_what_is_given_comes_as_it_was_at_the_call(engine: SshEngine) -> None:
    """It is copied before the cell goes on, and may change it; arrays may forbid writes."""
    array = numpy.arange(100_000)
    array.setflags(write=False)
    tensor = torch.ones(3)
    run = launch(lambda *given: given, engine, array, tensor, block=False, returns="all")
    tensor.zero_()
    for numbers, ones in run.result():
        assert numbers.sum() == array.sum() and ones.tolist() == [1.0, 1.0, 1.0]
    assert launch(os.getcwd, engine) == os.getcwd()


def test_that_hosts_stay_warm_is_told_once(engine: SshEngine, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        notebook_launcher(int, (), engine=engine, view="text", environment=CPU)
    first, second = [line for line in capsys.readouterr().out.splitlines() if "Launching" in line]
    assert first.endswith("by ssh: one (1), two (1); a process stays on each host 600 s for the next launch.")
    assert second.endswith("by ssh: one (1), two (1).")


def test_ranks_end_with_the_process_that_started_them(engine: SshEngine) -> None:
    """The next launch finds another one."""

    def kill() -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)

    with pytest.raises(WorkerKilledError, match=r"rank 1 .*SIGKILL"):
        launch(kill, engine)
    assert launch(os.getcwd, engine) == os.getcwd()


def test_what_a_killed_rank_has_forked_is_asked_to_end(engine: SshEngine, tmp_path: Path) -> None:
    def leave_child(ready: Path, asked: Path) -> None:
        if os.environ["RANK"] == "0":
            time.sleep(1000)
        if os.fork() == 0:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            ready.touch()
            signal.sigwait({signal.SIGTERM})
            time.sleep(0.2)
            asked.touch()
            os._exit(0)
        while not ready.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    asked = tmp_path / "asked"
    with pytest.raises(WorkerKilledError, match=r"rank 1 .*SIGKILL"):
        launch(leave_child, engine, tmp_path / "ready", asked)
    assert asked.exists()


@pytest.mark.parametrize(
    ("given", "more", "text"),
    [
        ({}, {}, "engine='ssh': hosts= has to say on which"),
        (
            {"hosts": ["one"]},
            {"hosts": ["one"]},
            "hosts= is said to SshEngine and to the launch: say it once",
        ),
        (
            {"ssh": "no-ssh-here"},
            {"hosts": ["one"]},
            "there is no program 'no-ssh-here' here: install OpenSSH",
        ),
        ({}, {"hosts": ["one"], "python": {"two": "/p"}}, "python= has 'two', which is none of the hosts"),
        (
            {},
            {"hosts": ["one:2", "two:2"], "num_processes": 3, "address": "x"},
            "hosts= says where the ranks run",
        ),
    ],
)
def test_what_cannot_be_is_told(
    given: dict[str, Any], more: dict[str, Any], text: str, engine: SshEngine
) -> None:
    own = {"ssh": engine._client.words, **given}
    with pytest.raises(ValueError, match=r"^notebook_launcher: ") as caught:
        notebook_launcher(print, engine=SshEngine(**own), **more)
    assert text in str(caught.value)


def test_hosts_that_are_down_are_told(engine: SshEngine) -> None:
    with pytest.raises(ValueError, match=r"host down: ssh does not reach it .*Connection refused"):
        notebook_launcher(print, engine=SshEngine(["down:2"], ssh=engine._client.words))


def test_hosts_are_for_ssh_alone() -> None:
    with pytest.raises(ValueError, match="with engine='local': it is for engine='ssh'"):
        notebook_launcher(print, hosts=["one"], engine="local")
    with pytest.raises(ValueError, match="hosts has 'one' 2 times"):
        SshEngine(["one", "one"])
