"""What a worker finds that is no fork of its notebook: by a fork of the agent, or as a fresh Python of its own."""

from __future__ import annotations

import gc
import logging
import os
import random
import re
import resource
import signal
import sys
import threading
import time
import warnings
from multiprocessing import get_context, managers, shared_memory
from pathlib import Path
from typing import Any

import pytest
import torch

from notebook_accel import notebook_launcher
from notebook_accel.launch.agent import client, modules
from notebook_accel.launch.agent.orders import Limits
from tests.faults.scripts import run

EXEC = {"TORCH_OWN": "1"}
"""A variable that libraries may read when they are imported: then no worker is a fork."""
WAYS = pytest.mark.parametrize("environment", [{}, EXEC], ids=["fork of the agent", "fresh Python"])


def launch(function: Any, *args: Any, environment: dict[str, str] | None = None) -> Any:
    return notebook_launcher(
        function,
        args,
        num_processes=2,
        start_method="fresh",
        environment={"ACCELERATE_USE_CPU": "true", **(environment or {})},
        view="none",
        output="none",
    )


def describe() -> dict[str, Any]:
    """Return what a process finds, as far as it is the same each time."""
    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGUSR2]
    own = {"TORCH_OWN", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
    return {
        "arguments": sys.argv,
        "path": sys.path,
        "folder": os.getcwd(),
        "variables": {name: text for name, text in os.environ.items() if name not in own},
        "leads": (os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()),
        "niceness": os.nice(0),
        "limits": Limits.capture(),
        "handlers": [str(signal.getsignal(signum)) for signum in signals],
        "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "wakes": signal.set_wakeup_fd(-1),
        "flags": (str(sys.flags), sys.warnoptions, sys.dont_write_bytecode, gc.isenabled()),
        "warnings": [(action, kind, module) for action, _, kind, module, _ in warnings.filters],
        "torch": (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()),
        "random": (random.random(), torch.rand(1).item()),
        "descriptors": sorted(
            re.sub(r"\d+", "", os.path.realpath(f"/dev/fd/{fd}")) for fd in os.listdir("/dev/fd")
        ),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "name": Path("/proc/self/comm").read_text() if sys.platform == "linux" else "",
    }


def test_a_fork_of_the_agent_finds_what_a_fresh_python_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    client.end()  # its templates have what other tests have imported, with the files that such modules keep open
    monkeypatch.setattr(modules.Modules, "capture", lambda more=(): modules.Modules(versions={}))
    forked, fresh = launch(describe), launch(describe, environment=EXEC)
    assert {name: (forked[name], fresh[name]) for name in forked if forked[name] != fresh[name]} == {}


def find_inherited() -> tuple[Limits, tuple[str, ...], int]:
    time.tzset()
    return Limits.capture(), time.tzname, os.stat(os.getcwd()).st_ino


@WAYS
def test_what_the_notebook_changes_later_counts(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Limits, cores, the file mode, the time zone and the folder; and back again."""
    monkeypatch.setenv("TZ", "UTC")
    before = Limits.capture()
    assert launch(find_inherited, environment=environment)[:2] == (before, ("UTC", "UTC"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TZ", "JST-9")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
        os.umask(0o027)
        if before.cores:
            os.sched_setaffinity(0, before.cores[:1])
        changed = Limits.capture()
        found = launch(find_inherited, environment=environment)
        assert found == (changed, ("JST", "JST"), tmp_path.stat().st_ino) and changed != before
    finally:
        before.adopt()
    assert launch(find_inherited, environment=environment)[0] == before


def count(values: Any, name: str) -> None:
    values["rank", os.environ["RANK"]] = os.getpid()
    memory = shared_memory.SharedMemory(name=name)
    memory.buf[int(os.environ["RANK"])] = 7
    memory.close()


@WAYS
def test_a_manager_and_shared_memory_of_the_notebook(environment: dict[str, str]) -> None:
    """A worker is let in by the manager, and its end does not remove the memory."""
    memory = shared_memory.SharedMemory(create=True, size=2)
    try:
        with managers.SyncManager(ctx=get_context("spawn")) as manager:
            values = manager.dict()
            launch(count, values, memory.name, environment=environment)
            assert sorted(values.keys()) == [("rank", "0"), ("rank", "1")]
        assert bytes(memory.buf) == b"\7\7"
        again = shared_memory.SharedMemory(name=memory.name)
        again.close()
    finally:
        memory.close()
        memory.unlink()


def find_level() -> tuple[int, str]:
    return logging.getLogger("torch._dynamo").level, str(torch.distributed.get_debug_level())


def test_a_variable_of_the_workers_that_torch_reads_when_it_is_imported() -> None:
    told = {"TORCH_LOGS": "+dynamo", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    assert launch(find_level)[0] != logging.DEBUG
    level, debug = launch(find_level, environment=told)
    assert level == logging.DEBUG and debug.endswith("DETAIL")


def test_files_beside_a_script_are_no_modules_of_its_agent(tmp_path: Path) -> None:
    out = run(
        """
        for name in ("multiprocessing", "queue", "resource", "selectors", "socket", "torch"):
            with open(f"{name}.py", "w") as file:
                file.write("raise ImportError('this is no module')")
        def tell(): return int(os.environ["RANK"])
        print(notebook_launcher(tell, num_processes=2, start_method="fresh", returns="all", view="none"))
        """,
        tmp_path,
    )
    assert out.splitlines()[-1] == "[0, 1]", out


@pytest.mark.parametrize("method", ["fork", "fresh"])
def test_a_default_timeout_of_sockets_is_not_for_ours(method: str, tmp_path: Path) -> None:
    out = run(
        f"""
        import socket, time
        from notebook_accel.launch.supervise.local_group import LocalWorkerGroup
        wait = LocalWorkerGroup._wait_for_starts
        def wait_longer(group):
            wait(group)
            time.sleep(1)
        LocalWorkerGroup._wait_for_starts = wait_longer
        socket.setdefaulttimeout(0.2)
        print(notebook_launcher(len, ("ab",), 2, start_method={method!r}, returns="all", view="none"))
        """,
        tmp_path,
    )
    assert out.splitlines()[-1] == "[2, 2]", out
