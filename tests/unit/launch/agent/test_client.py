"""An agent as its notebook knows it, and as long as that lives."""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from notebook_accel import runtime
from notebook_accel.launch.agent import client
from notebook_accel.launch.agent.client import Agent
from notebook_accel.stream.wire import GO
from tests.faults.scripts import is_alive, start
from tests.unit.clock import PATIENCE_S, wait_until
from tests.unit.launch.agent.ordering import (
    ask,
    make_imports,
    make_order,
    start_agent,
    start_worker,
    wait_for_end,
    wait_for_start,
)


@pytest.fixture
def without_agent() -> Iterator[None]:
    """Start without an agent of this process, and end with none."""
    client.end()
    yield
    client.end()


def test_the_end_of_a_worker_is_told() -> None:
    with start_agent() as agent:
        codes = {"os._exit(3)": 3, "os.kill(os.getpid(), 9)": -9, "1 / 0": 1, "None": 0}
        with ExitStack() as opened:
            orders = [make_order(code) for code in codes]
            workers = [opened.enter_context(start_worker(agent, order))[0] for order in orders]
            assert all(map(wait_for_start, workers)) and len({worker.pid for worker in workers}) == 4
            assert [wait_for_end(worker) for worker in workers] == list(codes.values())
            assert not any(worker.problem for worker in workers)


@pytest.mark.parametrize(
    ("words", "code"), [(["program", "true"], 0), (["program", "sh", "-c", "exit 7"], 7)]
)
def test_a_program(words: list[str], code: int) -> None:
    with start_agent() as agent, start_worker(agent, make_order(command=words)) as (worker, events):
        events.sendall(GO)
        assert wait_for_start(worker) and wait_for_end(worker) == code


@pytest.mark.parametrize("background", [False, True])
def test_an_agent_that_is_killed_while_it_imports(background: bool) -> None:
    with start_agent(background=background) as agent, start_worker(agent, make_order()) as (worker, _):
        os.kill(agent.pid, signal.SIGKILL)
        assert wait_for_end(worker) is None and worker.pid == worker.error == 0
        assert worker.problem == "the agent, the process that starts workers, has ended"
        wait_until(lambda: agent.has_ended)
        with pytest.raises(ConnectionError), start_worker(agent, make_order()):
            pass


def test_what_an_agent_wrote_before_it_ended_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "selectors.py").write_text("name_of_nothing")
    monkeypatch.syspath_prepend(tmp_path)
    with start_agent() as agent, start_worker(agent, make_order()) as (worker, _):
        wait_for_end(worker)
        assert worker.problem.endswith("NameError: name 'name_of_nothing' is not defined")


def test_no_order_is_lost_where_an_agent_was_idle_for_long(
    without_agent: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends by itself; an order that comes then goes to another one."""
    monkeypatch.setattr(client, "IDLE_SECONDS", 0.03)
    pids = set()
    for _ in range(25):
        with ExitStack() as opened:
            order = make_order(command=("program", "true"))
            try:
                worker, events = opened.enter_context(start_worker(client.start(), order))
            except ConnectionError:
                worker, events = opened.enter_context(start_worker(client.start(), order))
            pids.add(worker.agent.pid)
            assert wait_for_start(worker), worker.problem
            events.sendall(GO)
            assert wait_for_end(worker) == 0
        time.sleep(random.uniform(0.0, 0.06))
    assert len(pids) > 1


def test_it_is_ready_when_it_has_imported_what_it_was_told_to() -> None:
    with start_agent() as agent:
        for name in ("colorsys", "wave", "colorsys"):
            agent.import_ahead(make_imports(name, in_background=True))
        assert not agent.is_ready
        wait_until(lambda: agent.is_ready)
        if sys.platform == "linux":
            assert ask(agent, "{'colorsys', 'wave'} <= sys.modules.keys()")


def test_one_that_has_read_other_variables_is_replaced(
    without_agent: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = psutil.Process(client.start().pid)
    assert client.start().pid == first.pid
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert client.start().pid == first.pid, "workers are told that one"
    monkeypatch.setenv("TORCH_OWN", "1")
    assert client.start().pid != first.pid
    wait_until(lambda: not first.is_running())
    monkeypatch.delenv("TORCH_OWN")


def test_two_threads_start_one(without_agent: None) -> None:
    """A run in the background starts while a cell ends."""
    together = threading.Barrier(2)

    def start() -> Agent:
        assert client.find() is None
        together.wait(PATIENCE_S)
        return client.start()

    with ThreadPoolExecutor(2) as pool:
        found = [future.result() for future in [pool.submit(start) for _ in range(2)]]
    assert found[0] is found[1] and runtime.agents() == [found[0]] and found[0].is_usable
    children = psutil.Process().children()
    assert [child.pid for child in children if "agent.server" in " ".join(child.cmdline())] == [found[0].pid]


def test_one_that_cannot_start_leaves_nothing(without_agent: None) -> None:
    """Not even a descriptor: with each number that is too low it is another call that fails."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = {int(name) for name in os.listdir("/dev/fd")}
    unused = [fd for fd in range(max(opened) + 30) if fd not in opened]
    failures = 0
    try:
        for fd in unused:
            resource.setrlimit(resource.RLIMIT_NOFILE, (fd, limits[1]))
            try:
                client.start()
            except OSError:
                failures += 1
            else:
                break
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert failures > 4
    client.end()
    assert {int(name) for name in os.listdir("/dev/fd")} == opened and runtime.agents() == []


def test_all_end_with_a_process_that_is_killed(tmp_path: Path) -> None:
    """Also where a fork of it goes on, which has what it had."""
    (tmp_path / "site-packages").mkdir()
    for name in ("fruit", "nut"):
        (tmp_path / "site-packages" / f"{name}.py").touch()
    program = start(
        """
        sys.path.append(os.path.abspath("site-packages"))
        def idle():
            open(f"began{os.environ['RANK']}", "w").close()
            time.sleep(600)
        from notebook_accel.launch.agent import client
        sessions = []
        for name in ("fruit", "nut"):
            __import__(name)
            sessions.append(Session(1, start_method="fresh"))
        run = notebook_launcher(idle, num_processes=2, start_method="fresh", block=False, view="none")
        wait_until(lambda: os.path.exists("began0") and os.path.exists("began1"), "the ranks begin")
        fork = os.fork()
        if fork == 0:
            os.setsid()
            time.sleep(600)
            os._exit(0)
        print(fork, client.find().pid, flush=True)
        time.sleep(600)
        """,
        tmp_path,
    )
    assert program.stdout is not None
    fork, agent = map(int, program.stdout.readline().split())
    try:
        below = psutil.Process(agent).children(recursive=True)
        assert len(below) >= 6, "four workers, two templates"
        program.kill()
        wait_until(lambda: not any(is_alive(process.pid) for process in below) and not is_alive(agent))
        assert is_alive(fork)
    finally:
        os.kill(fork, signal.SIGKILL)
        program.communicate()
