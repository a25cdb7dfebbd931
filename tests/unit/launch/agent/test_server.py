"""How an agent starts workers: by a fork of itself or of a template, or as a fresh Python."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from notebook_accel import environ
from notebook_accel.launch.agent.client import Agent
from notebook_accel.launch.agent.modules import Modules, read_by_imports, read_version
from notebook_accel.launch.agent.orders import ImportOrder
from notebook_accel.stream.wire import GO
from tests.unit.clock import wait_until
from tests.unit.launch.agent.ordering import (
    ask,
    make_imports,
    make_order,
    start_agent,
    start_worker,
    wait_for_end,
    wait_for_start,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="agents of other systems do not fork")
HOW = "os.getppid(), 'agent.server import' in ' '.join(sys.orig_argv)"
"""Evaluates to the process that has started a worker, and whether by a fork."""


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    with start_agent() as made:
        yield made


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder for modules."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    return folder


def make_found(folder: Path, name: str, text: str) -> ImportOrder:
    """Write a module, and return the order to import what a notebook then has."""
    file = folder / f"{name}.py"
    file.write_text(text)
    return make_imports(
        modules=Modules(names=[name], versions={name: read_version(str(file))}), path=[*sys.path, str(folder)]
    )


def test_by_forks_of_itself_and_of_a_template(agent: Agent, installed: Path) -> None:
    assert ask(agent, HOW) == (agent.pid, True)
    imports = make_found(installed, "fruit", "import os\nMADE_IN = os.getpid()\n")
    code = f"{HOW}, sys.modules['fruit'].MADE_IN"
    template, forked, made_in = ask(agent, code, imports=imports)
    assert template == made_in != agent.pid and forked
    assert ask(agent, code, imports=imports) == (template, True, template)
    assert ask(agent, HOW) == (template, True), "which has more than is needed"
    more = make_found(installed, "nut", "")
    both = replace(more, modules=replace(more.modules, names=["fruit", "nut"]))
    next_template, forked, made_in = ask(agent, code, imports=both)
    assert next_template not in (agent.pid, template) and forked and made_in == template


def test_a_module_whose_file_has_changed_is_imported_anew(agent: Agent, installed: Path) -> None:
    for value in ("1", "22"):
        imports = make_found(installed, "changing", f"VALUE = {value}\n")
        assert ask(agent, "sys.modules['changing'].VALUE", imports=imports) == int(value)


def test_a_module_that_makes_a_thread_is_passed_over(agent: Agent, installed: Path) -> None:
    """A fork would lack the thread."""
    text = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    imports = make_found(installed, "threaded", text)
    for _ in range(2):
        assert ask(agent, "'threaded' in sys.modules", imports=imports) is False
    assert ask(agent, HOW, imports=imports)[1] is True


def test_a_module_that_ends_the_process_is_passed_over(agent: Agent, installed: Path) -> None:
    imports = make_found(installed, "ending", "import os, time\ntime.sleep(0.5)\nos._exit(0)\n")
    with ExitStack() as opened:
        workers = [
            opened.enter_context(start_worker(agent, make_order(imports=imports)))[0] for _ in range(4)
        ]
        assert all(wait_for_start(worker) > 0 and wait_for_end(worker) == 0 for worker in workers)
    assert ask(agent, HOW, imports=imports)[1] is True and not agent.has_ended


def test_workers_that_were_ordered_start_though_no_more_are(installed: Path) -> None:
    imports = make_found(installed, "slow", "import time\ntime.sleep(1)\n")
    with start_agent() as agent:
        with start_worker(agent, make_order(imports=imports)) as (worker, _):
            agent.retire()
            assert wait_for_start(worker) > 0 and wait_for_end(worker) == 0
        wait_until(lambda: agent.has_ended)


def test_a_killed_template_costs_one_launch(agent: Agent, installed: Path) -> None:
    imports = make_found(installed, "killed", "")
    template, _ = ask(agent, HOW, imports=imports)
    os.kill(template, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{template}").exists())
    assert ask(agent, HOW, imports=imports)[1] is True


def test_a_module_that_fails_is_left_to_the_worker_that_needs_it(agent: Agent, installed: Path) -> None:
    imports = make_found(installed, "failing", "raise SystemExit('no license')\n")
    assert ask(agent, f"{HOW}, 'failing' in sys.modules", imports=imports)[1:] == (True, False)


@pytest.mark.parametrize(
    ("name", "is_read"),
    [
        *[
            (name, True)
            for name in ("TORCH_LOGS", "TORCH_DISTRIBUTED_DEBUG", "TORCHDYNAMO_DISABLE", "TORCHINDUCTOR_X")
        ],
        *[(name, True) for name in ("PYTORCH_CUDA_ALLOC_CONF", "ATEN_CPU_CAPABILITY", "MALLOC_ARENA_MAX")],
        *[(name, True) for name in ("PYTHONHASHSEED", "LD_PRELOAD", "LC_ALL", "LANG", "LANGUAGE")],
        *[
            (name, True)
            for name in ("OMP_WAIT_POLICY", "KMP_BLOCKTIME", "GOMP_CPU_AFFINITY", "MKL_NUM_THREADS")
        ],
        *[(name, True) for name in ("OPENBLAS_NUM_THREADS", "DNNL_VERBOSE", "ONEDNN_VERBOSE")],
        *[(name, False) for name in ("OMP_NUM_THREADS", "PYTHONPATH", "PYTHONWARNINGS", "KMP_INIT_AT_FORK")],
        *[
            (name, False)
            for name in ("TORCHELASTIC_RUN_ID", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "RANK", "HOME")
        ],
        *[(name, False) for name in ("MASTER_PORT", "CUDA_VISIBLE_DEVICES", "NOTEBOOK_ACCEL_AGENT", "TZ")],
    ],
)
def test_what_libraries_read_when_they_are_imported(agent: Agent, name: str, is_read: bool) -> None:
    """A worker that is told such a variable is a fresh Python."""
    assert bool(read_by_imports({name: "1"})) is is_read


def test_a_variable_that_libraries_read_makes_a_fresh_python(agent: Agent) -> None:
    variables = environ.snapshot()
    code = f"{HOW}, __import__('logging').getLogger('torch._dynamo').level"
    assert ask(agent, code, environment={**variables, "TORCH_LOGS": "+dynamo"}) == (agent.pid, False, 10)


@pytest.mark.parametrize("package", ["torch", "numpy"])
def test_another_version_makes_a_fresh_python(agent: Agent, package: str) -> None:
    changed = make_imports(modules=Modules(versions={package: (1, 1)}))
    assert ask(agent, HOW, imports=changed) == (agent.pid, False)


def test_a_worker_that_cannot_start() -> None:
    """The agent has no descriptor for it."""
    order = make_order(command=("program", "true"))
    with start_agent() as agent:

        def run(limit: int) -> int:
            resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (limit, hard))
            with start_worker(agent, order) as (worker, events):
                if wait_for_start(worker):
                    events.sendall(GO)
                code = wait_for_end(worker)
                assert (worker.pid > 0, code) == ((False, None) if worker.error else (True, 0))
                return worker.error

        hard = resource.prlimit(agent.pid, resource.RLIMIT_NOFILE)[1]
        assert run(hard) == 0
        most = max(int(name) for name in os.listdir(f"/proc/{agent.pid}/fd"))
        errors = itertools.dropwhile(
            lambda error: error == 0, (run(limit) for limit in range(most + 20, 8, -1))
        )
        assert next(errors) == errno.EMFILE
        assert run(hard) == 0


def list_ends(pid: int) -> set[str]:
    """Return the pipes and sockets that a process has open."""
    folder = Path(f"/proc/{pid}/fd")
    return {end for fd in folder.iterdir() if (end := os.readlink(fd)).startswith(("pipe:", "socket:"))} - {
        os.readlink(f"/proc/self/fd/{fd}") for fd in (1, 2)
    }


def test_no_worker_and_no_template_holds_the_ends_of_another(agent: Agent, installed: Path) -> None:
    fruit = make_found(installed, "plum", "")
    nut = make_found(installed, "almond", "")
    fresh = {"environment": {**environ.snapshot(), "TORCH_OWN": "1"}}
    with ExitStack() as opened:
        pids: list[int] = []
        for changes in ({}, fresh, {"imports": fruit}, fresh, {"imports": fruit}, {"imports": nut}, {}):
            order = make_order("ends.events.send(b'x'), time.sleep(600)", **changes)
            worker, events = opened.enter_context(start_worker(agent, order))
            assert events.recv(1) == b"x"
            pids.append(wait_for_start(worker))
            opened.callback(os.kill, pids[-1], signal.SIGKILL)
        parents = {
            pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in pids
        }
        templates = set(parents.values()) - {agent.pid}
        assert len(templates) >= 2
        ends = {pid: list_ends(pid) for pid in (*pids, *templates)}
        assert {len(ends[pid]) for pid in pids} == {2}, ("its events and its lifeline", ends)
        for pid in pids:
            for other in ends.keys() - {pid}:
                shared = ends[pid] & ends[other]
                assert len(shared) == (parents[pid] == other), (
                    shared,
                    "a parent has the other end of the lifeline",
                )
        assert not set.intersection(*(ends[template] for template in templates))


def test_an_agent_that_imports_in_the_background_has_workers_that_are_not_niced(installed: Path) -> None:
    threads = "map(int, os.listdir('/proc/self/task'))"
    with start_agent(background=True) as agent:
        agent.import_ahead(replace(make_found(installed, "plum", ""), in_background=True))
        wait_until(lambda: agent.is_ready)
        found = ask(agent, f"{{os.getpriority(os.PRIO_PROCESS, thread) for thread in {threads}}}")
        assert found == {os.nice(0)}
