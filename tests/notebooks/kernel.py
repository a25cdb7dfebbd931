"""A real Jupyter kernel for tests: runs cells, interrupts, kills, and tells what a front end would have shown."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jupyter_client.connect
import jupyter_client.launcher
import jupyter_core.utils
import psutil
import pytest
from jupyter_client import BlockingKernelClient, KernelManager

from tests import elsewhere, forker
from tests.ports import reserve_port

ROOT = Path(__file__).resolve().parents[2]
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
AGENT = "accel-agent"
_AGENT_CODE = "launch.agent.server import main"
METHODS = ("fork", "fresh")
METHODS_ONCE = ("fork", *(pytest.param(name, marks=pytest.mark.once) for name in METHODS[1:]))
"""For tests in which the notebook packages have to do with one method as with any other."""
SLEEP = "from tests.notebooks.sleeping import sleep_and_tell; sleep_and_tell(60)"
"""A cell to interrupt."""


@dataclass
class Cell:
    """What a cell's execution sent, in order, as a front end keeps it."""

    outputs: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    late: list[dict[str, Any]] = field(default_factory=list)

    def stream(self, name: str) -> str:
        """Return the text of stdout or stderr."""
        return "".join(
            o["content"]["text"]
            for o in self.outputs
            if o["type"] == "stream" and o["content"]["name"] == name
        )

    @property
    def stdout(self) -> str:
        return self.stream("stdout")

    @property
    def stderr(self) -> str:
        return self.stream("stderr")

    @property
    def lines(self) -> list[str]:
        """Return the lines of stdout without the launcher's announcement."""
        return [line for line in self.stdout.splitlines() if not line.startswith("Launching ")]

    @property
    def error(self) -> tuple[str, str] | None:
        """Return type name and text of the error."""
        for output in self.outputs:
            if output["type"] == "error":
                return output["content"]["ename"], output["content"]["evalue"]
        return None

    @property
    def traceback(self) -> str:
        """Return the traceback as shown, without colours."""
        for output in self.outputs:
            if output["type"] == "error":
                return _COLOURS.sub("", "\n".join(output["content"]["traceback"]))
        return ""

    @property
    def told(self) -> str:
        """Return the traceback and what stands on stderr: old versions of IPython show no notes in tracebacks."""
        return self.traceback + self.stderr

    @property
    def value(self) -> str:
        """Return the text of the cell's value."""
        for output in self.outputs:
            if output["type"] == "execute_result":
                return str(output["content"]["data"]["text/plain"])
        return ""

    @property
    def displays(self) -> list[dict[str, Any]]:
        """Return the data of the displays, updates applied, as they stand at the end."""
        shown: list[dict[str, Any]] = []
        ids: dict[str, int] = {}
        for output in self.outputs:
            display_id = output["content"].get("transient", {}).get("display_id")
            if output["type"] == "display_data":
                if display_id:
                    ids[display_id] = len(shown)
                shown.append(output["content"]["data"])
            elif output["type"] == "update_display_data" and display_id in ids:
                shown[ids[display_id]] = output["content"]["data"]
        return shown

    def ok(self) -> Cell:
        """Fail where the cell raised; return the cell."""
        assert self.error is None, f"{self.traceback}\nstdout: {self.stdout}\nstderr: {self.stderr}"
        return self


class Kernel:
    """One kernel process and a client of it.

    Args:
        folder: its working folder.
        prefix: words before the kernel's command.
        python: runs the kernel.
        transport: `tcp`, or `ipc` for a kernel in a network of its own.
        is_copy: whether it may be a copy of a process that has imported torch, by `tests/forker.py`.
        environment: further variables.
    """

    def __init__(
        self,
        folder: Path,
        prefix: Sequence[str] = (),
        python: str = sys.executable,
        transport: str = "tcp",
        is_copy: bool = False,
        **environment: str,
    ) -> None:
        unset = ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "ACCELERATE_DEBUG_MODE")
        self.folder = folder
        env = {name: value for name, value in os.environ.items() if name not in unset}
        path = elsewhere.make_path(ROOT, env.get("PYTHONPATH", ""))
        env |= {"PYTHONPATH": path, "IPYTHONDIR": str(folder / "ipython")}
        env |= {"NOTEBOOK_ACCEL_VIEW": "text", **environment}
        self.manager = KernelManager(kernel_name="python3", transport=transport)
        self._reserved = contextlib.ExitStack()
        if transport == "ipc":
            self.manager.ip = str(folder / "k")
        else:
            self._reserve_ports()
        assert self.manager.kernel_spec is not None
        self.manager.kernel_spec.argv[:1] = [*prefix, python]
        self.is_copy = is_copy and not elsewhere.SYSTEM
        with self._starting():
            self.manager.start_kernel(
                env=env, cwd=str(folder), extra_arguments=["--HistoryManager.enabled=False"]
            )
        self.client: BlockingKernelClient = self.manager.blocking_client()
        self.client.start_channels()
        try:
            self.client.wait_for_ready(timeout=240)
            self.pid = int(self.run("import os; os.getpid()").value)
        except BaseException:
            self.close()  # its threads would go on asking
            raise

    def _reserve_ports(self) -> None:
        """Choose the kernel's ports: those that Jupyter chooses may be somebody else's until the kernel listens."""
        self.manager.cache_ports = False
        for name in jupyter_client.connect.port_names:
            setattr(self.manager, name, self._reserved.enter_context(reserve_port()))

    @contextlib.contextmanager
    def _starting(self) -> Iterator[None]:
        """Let Jupyter start this kernel's process as a copy, if it may be one."""
        if self.is_copy:
            start = partial(forker.start, libraries=forker.KERNEL)
            with mock.patch.object(jupyter_client.launcher, "Popen", start):
                yield
        else:
            yield

    def run(
        self, code: str, timeout: float = 240, during: Callable[[], None] | None = None, at: str = "go"
    ) -> Cell:
        """Run a cell to its end; `during` is called once as soon as the cell prints a word, or tells it on stderr."""
        started = time.monotonic()
        request = self.client.execute(textwrap.dedent(code), stop_on_error=False)
        cell = Cell()
        deadline = started + timeout
        while True:
            remaining = deadline - time.monotonic()
            assert remaining > 0, f"the cell did not end within {timeout} s: {cell.stdout} {cell.stderr}"
            message = self.client.get_iopub_msg(timeout=remaining)
            if message["parent_header"].get("msg_id") != request:
                continue
            if message["msg_type"] == "status":
                if message["content"]["execution_state"] == "idle":
                    break
                continue
            if message["msg_type"] == "execute_input":
                continue
            cell.outputs.append({"type": message["msg_type"], "content": message["content"]})
            if during is not None and (at in cell.stdout.split() or at in cell.stderr):
                during()
                during = None
        cell.seconds = time.monotonic() - started
        while self.client.get_shell_msg(timeout=timeout)["parent_header"]["msg_id"] != request:
            pass  # a late answer to the questions by which the client found the kernel ready
        return cell

    def late_output(self, seconds: float) -> list[dict[str, Any]]:
        """Return messages of cells that have ended already."""
        late = []
        end = time.monotonic() + seconds
        while (remaining := end - time.monotonic()) > 0:
            try:
                message = self.client.get_iopub_msg(timeout=remaining)
            except Exception:
                break
            if message["msg_type"] not in ("status", "execute_input"):
                late.append(message)
        return late

    def interrupt(self) -> None:
        """Interrupt as a front end does."""
        self.manager.interrupt_kernel()

    def kill(self) -> None:
        """SIGKILL the kernel process."""
        os.kill(self.pid, signal.SIGKILL)

    def restart(self, now: bool) -> None:
        """Restart as a front end does; `now` kills the kernel after an interrupt, else it is asked to end first."""
        with self._starting():
            self.manager.restart_kernel(now=now)
        try:
            self.client.wait_for_ready(timeout=240)
            self.pid = int(self.run("import os; os.getpid()").value)
        except BaseException:
            self.close()  # its threads would go on asking
            raise

    def children(self) -> list[psutil.Process]:
        """Return the kernel's processes apart from those that stay for the next launch."""
        found = psutil.Process(self.pid).children(recursive=True)
        return [process for process in found if not _is_servant(process)]

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()
        self.client.context.destroy(linger=0)
        self._reserved.close()


def _is_servant(process: psutil.Process) -> bool:
    """Whether it is the agent, a template of it or a resource tracker, or ends with a worker."""
    words = ("multiprocessing.resource_tracker", "read _; kill -s KILL")  # the second is of lifeline
    try:
        line = " ".join(process.cmdline())
        if process.name() == AGENT or any(word in line for word in words):
            return True
        # the agent has its name soon; its workers, and what they fork, have its command line too
        parent = process.parent()
        return _AGENT_CODE in line and parent is not None and _AGENT_CODE not in " ".join(parent.cmdline())
    except psutil.Error:
        return True


def make_event_loop() -> None:
    """Make the event loop that jupyter_client keeps for this thread, before a test counts descriptors."""
    ensure = getattr(jupyter_core.utils, "ensure_event_loop", None)  # old versions close theirs
    if ensure is not None:
        ensure()


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until something holds; return whether it does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


@contextlib.contextmanager
def prepare_kernel(kernel: Kernel, *cells: str, timeout: float) -> Iterator[Kernel]:
    """Run cells in a new kernel, and close it after the block.

    Args:
        kernel: the kernel.
        cells: are to raise nothing.
        timeout: seconds that each may take.
    """
    try:
        for cell in cells:
            kernel.run(cell, timeout=timeout).ok()
        yield kernel
    finally:
        kernel.close()
