"""Agents of tests, and workers that say what they find."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from notebook_accel import environ
from notebook_accel.launch.agent import client
from notebook_accel.launch.agent.client import Agent, AgentWorker
from notebook_accel.launch.agent.modules import Modules
from notebook_accel.launch.agent.orders import ImportOrder, Limits, WorkerOrder
from notebook_accel.launch.worker import lifeline
from notebook_accel.launch.worker.main import WorkerEnds
from notebook_accel.stream.readable import wait_readable

WAIT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluate:
    """Work: sends what an expression is in the worker."""

    code: str

    def run(self, ends: WorkerEnds, fds: Sequence[int]) -> NoReturn:
        lifeline.follow(ends.lifeline)
        names = {name: __import__(name) for name in ("os", "signal", "sys", "threading", "time")}
        ends.events.sendall(pickle.dumps(eval(self.code, {**names, "ends": ends, "fds": fds})))
        os._exit(0)


@contextmanager
def start_agent(*, background: bool = False) -> Iterator[Agent]:
    """Have an agent of its own."""
    agent = client.spawn(
        path=client.list_path(), variables=environ.snapshot(), with_ipython=False, background=background
    )
    try:
        yield agent
    finally:
        agent.end()


def make_order(code: str = "None", imports: ImportOrder | None = None, **changes: Any) -> WorkerOrder:
    """Return an order of a worker that evaluates an expression; it finds what this process has, but no module of it."""
    variables = environ.snapshot()
    order = WorkerOrder(
        rank=0,
        environment=variables,
        directory=os.getcwd(),
        limits=Limits.capture(),
        imports=imports or make_imports(),
        work=pickle.dumps(Evaluate(code=code)),
    )
    return replace(order, **changes)


def make_imports(*names: str, **changes: Any) -> ImportOrder:
    """Return an order to import modules."""
    imports = ImportOrder(
        modules=Modules(names=names, versions={}), environment=environ.snapshot(), path=list(sys.path)
    )
    return replace(imports, **changes)


@contextmanager
def start_worker(agent: Agent, order: WorkerOrder) -> Iterator[tuple[AgentWorker, socket.socket]]:
    """Have a worker, and our end of what it sends."""
    with ExitStack() as opened:
        events, theirs = map(opened.enter_context, socket.socketpair())
        events.settimeout(WAIT_S)
        worker = agent.start_worker(order, [theirs.fileno(), 1, 2])
        opened.callback(worker.close)
        theirs.close()
        yield worker, events


def wait_for_start(worker: AgentWorker) -> int:
    """Return the process id of a worker; 0 where there is none."""
    while not (worker.look() or worker.pid):
        assert wait_readable(worker.fileno(), WAIT_S), "no word of the agent"
    return worker.pid


def wait_for_end(worker: AgentWorker) -> int | None:
    """Return the exit code of a worker."""
    while not worker.look():
        assert wait_readable(worker.fileno(), WAIT_S), "no word of the agent"
    return worker.exitcode


def ask(agent: Agent, code: str, **changes: Any) -> Any:
    """Return what an expression is in a new worker."""
    with start_worker(agent, make_order(code, **changes)) as (worker, events):
        text = b"".join(iter(lambda: events.recv(1 << 16), b""))
        assert (wait_for_end(worker), worker.error) == (0, 0), agent.explain_end()
        return pickle.loads(text)
