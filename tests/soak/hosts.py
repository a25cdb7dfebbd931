"""The two kinds of processes that launch in a soak: a Jupyter kernel, and a plain Python program."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.notebooks.kernel import Cell, Kernel
from tests.soak import processes

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
HANG_SECONDS = 240.0
"""How long a piece of code may take; all take seconds on an idle machine."""
END_SECONDS = 60.0
"""How long anything of a kernel may live on that was killed; a second or two on an idle machine."""
_LOOK_SECONDS = 0.02
_ASK_SECONDS = 20.0  # after which a kernel is asked whether it still works at a cell
_SHOWN = 6000  # characters of output in the evidence


class SoakError(Exception):
    """A leak, a hang or a wrong value; the text is the evidence."""


@dataclass
class Outcome:
    """How a piece of code ended.

    Attributes:
        error: type and text of what it raised.
        answer: what it gave to `answer`.
        output: what was shown meanwhile.
        trace: the traceback as shown.
        seconds: how long it took.
        was_killed: whether the host ended meanwhile.
        exitcode: of a kernel that did.
        aims: where it sent signals to itself.
    """

    error: tuple[str, str] | None = None
    answer: Any = None
    output: str = ""
    trace: str = ""
    seconds: float = 0.0
    was_killed: bool = False
    exitcode: int | None = None
    aims: str = ""

    def __str__(self) -> str:
        words = (
            "" if self.error is None else f"\nraised {self.error[0]}: {self.error[1]}\n{self.trace[-_SHOWN:]}"
        )
        if self.was_killed:
            words += f"\nended with code {self.exitcode}"
        return f"answer: {self.answer!r}{words}\nsignals at: {self.aims}\noutput: {self.output[-_SHOWN:]}"


During = Callable[["Host", threading.Event], None]
"""What is done to a host while a piece of code runs; the event says that it has ended."""


class Host(ABC):
    """A process that launches, with a mark that all its processes inherit.

    Args:
        folder: its own: working folder, temp files, stacks.

    Attributes:
        kind: `notebook` or `program`.
        pid: of the process.
        mark: value of the variable that marks its processes.
    """

    kind: str
    pid: int

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temp = folder / "t"
        self.temp.mkdir(parents=True)
        self.stacks = folder / "stacks.txt"
        self.stacks.touch()
        self.mark = uuid.uuid4().hex
        path = os.pathsep.join([str(HERE / "site"), str(ROOT)])
        self._variables = {
            "PYTHONPATH": path,
            "TMPDIR": str(self.temp),
            "ACCELERATE_USE_CPU": "1",
            "NOTEBOOK_ACCEL_VIEW": "text",
            "NA_SOAK_STACKS": str(self.stacks),
            processes.MARK: self.mark,
        }
        self._answer = folder / "answer.json"
        self.aims = folder / "answer.json.aim"

    def prepare(self) -> None:
        """Define the functions that the actions launch."""
        code = (HERE / "cells.py").read_text()
        self.demand(f"{code}\nANSWER = {str(self._answer)!r}\nimport torch\ntorch.set_num_threads(1)")

    def run(self, code: str, during: During | None = None, seconds: float = HANG_SECONDS) -> Outcome:
        """Run a piece of code to its end.

        Args:
            code: Python source.
            during: done meanwhile, in a thread.
            seconds: after which it hangs.

        Raises:
            SoakError: it hangs.
        """
        for path in (self._answer, self.aims):
            path.unlink(missing_ok=True)
        ended = threading.Event()
        disturber = threading.Thread(target=during, args=(self, ended)) if during is not None else None
        began = time.monotonic()
        self._send(textwrap.dedent(code))
        if disturber is not None:
            disturber.start()
        try:
            outcome = self._wait(seconds)
        finally:
            ended.set()
            if disturber is not None:
                disturber.join()
        outcome.seconds = time.monotonic() - began
        with contextlib.suppress(FileNotFoundError):
            outcome.answer = json.loads(self._answer.read_text())
        with contextlib.suppress(FileNotFoundError):
            outcome.aims = self.aims.read_text()
        return outcome

    def demand(self, code: str, seconds: float = HANG_SECONDS) -> Any:
        """Run a piece of code that has to succeed, and return its answer."""
        outcome = self.run(code, seconds=seconds)
        if outcome.error is not None or outcome.was_killed:
            raise SoakError(f"this failed in the {self.kind}:\n{textwrap.dedent(code)[-800:]}\n{outcome}")
        return outcome.answer

    def kill(self) -> None:
        """Kill the process."""
        processes.send(self.pid, signal.SIGKILL)

    def fail_by_hang(self, seconds: float, output: str) -> NoReturn:
        """Raise with the stacks of all processes of this host."""
        marked = sorted(processes.find_marked(self.mark), key=lambda pid: pid != self.pid)
        stacks = processes.describe(marked, self.stacks)
        raise SoakError(
            f"the {self.kind} hangs: no end in {seconds:g} s\noutput: {output[-_SHOWN:]}\n{stacks}"
        )

    @abstractmethod
    def _send(self, code: str) -> None:
        """Let the process begin with a piece of code."""

    @abstractmethod
    def _wait(self, seconds: float) -> Outcome:
        """Wait for the end of the piece."""

    def interrupt(self) -> None:
        """Interrupt the process group, as a front end and a terminal do."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGINT)

    @abstractmethod
    def finish(self) -> None:
        """Let the process end by itself, as its user does."""

    @abstractmethod
    def close(self) -> None:
        """End the process and all that it has started, whatever state they are in."""

    def _kill_marked(self) -> None:
        for pid in processes.find_marked(self.mark):
            processes.send(pid, signal.SIGKILL)


class NotebookHost(Host):
    """A Jupyter kernel."""

    kind = "notebook"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._kernel = Kernel(folder, **self._variables)
        self.pid = self._kernel.pid

    def _send(self, code: str) -> None:
        self._request = self._kernel.client.execute(code, stop_on_error=False)

    def _wait(self, seconds: float) -> Outcome:
        cell, question = Cell(), ""
        began = time.monotonic()
        deadline = began + seconds
        failed: tuple[str, str] | None = None
        is_shown = is_answered = False
        while not (is_shown and is_answered):
            is_shown = self._hear_output(cell) or is_shown
            reply, error = self._hear_reply()
            is_answered = is_answered or reply == self._request
            # where a second interrupt meets IPython while it shows the first, only the reply tells of it
            failed = failed or (error if reply == self._request else None)
            now = time.monotonic()
            if processes.read_process(self.pid) is None:
                code = self._kernel.manager.provisioner.process.wait(10)  # its threads may still end
                return Outcome(output=cell.stdout + cell.stderr, was_killed=True, exitcode=code)
            if question and reply == question and not is_answered:
                # the interrupt met ipykernel's own code, after the cell's: it goes on, and this cell gets no answer
                return Outcome(error=("KeyboardInterrupt", ""), output=cell.stdout + cell.stderr)
            if not question and now - began > _ASK_SECONDS:
                question = self._kernel.client.kernel_info()
            if now > deadline:
                self.fail_by_hang(seconds, cell.stdout + cell.stderr)
        return Outcome(error=cell.error or failed, output=cell.stdout + cell.stderr, trace=cell.traceback)

    def _hear_output(self, cell: Cell) -> bool:
        """Add what is shown of the cell; return whether it was the last."""
        with contextlib.suppress(queue.Empty):
            while True:
                message = self._kernel.client.get_iopub_msg(timeout=_LOOK_SECONDS)
                if message["parent_header"].get("msg_id") != self._request:
                    continue
                if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                    return True
                cell.outputs.append({"type": message["msg_type"], "content": message["content"]})
        return False

    def _hear_reply(self) -> tuple[str, tuple[str, str] | None]:
        """Return the request that was answered, empty where none was, and type and text of its error."""
        with contextlib.suppress(queue.Empty):
            reply = self._kernel.client.get_shell_msg(timeout=0)
            content = reply["content"]
            error = (content["ename"], content["evalue"]) if content.get("status") == "error" else None
            return str(reply["parent_header"]["msg_id"]), error
        return "", None

    def finish(self) -> None:
        self._kernel.manager.shutdown_kernel(now=False)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
        self._kernel.close()
        self._kill_marked()


class ProgramHost(Host):
    """A plain Python program."""

    kind = "program"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        theirs, self._pieces = os.pipe()
        self._answers, theirs_too = os.pipe()
        self._log = folder / "output.txt"
        environment = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "program.py"), str(theirs), str(theirs_too)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**environment, **self._variables},
                pass_fds=(theirs, theirs_too),
                start_new_session=True,
            )
        for fd in (theirs, theirs_too):
            os.close(fd)
        os.set_blocking(self._answers, False)
        self.pid = self._process.pid
        self._from = 0

    def _send(self, code: str) -> None:
        self._from = self._log.stat().st_size
        os.write(self._pieces, json.dumps(code).encode() + b"\n")

    def _wait(self, seconds: float) -> Outcome:
        deadline, data = time.monotonic() + seconds, b""
        while not data.endswith(b"\n"):
            with contextlib.suppress(BlockingIOError):
                data += os.read(self._answers, 1 << 20)
            if self._process.poll() is not None:
                return Outcome(output=self._read_output(), was_killed=True)
            if time.monotonic() > deadline:
                self.fail_by_hang(seconds, self._read_output())
            time.sleep(0.005)
        error = json.loads(data)
        found = None if error is None else (error[0], error[1])
        return Outcome(error=found, output=self._read_output(), trace=error[2] if error else "")

    def _read_output(self) -> str:
        with self._log.open("rb") as log:
            log.seek(self._from)
            return log.read().decode("utf-8", "replace")

    def finish(self) -> None:
        os.close(self._pieces)
        self._pieces = -1
        self._from = self._log.stat().st_size
        try:
            code = self._process.wait(HANG_SECONDS)
        except subprocess.TimeoutExpired:
            self.fail_by_hang(HANG_SECONDS, self._read_output())
        if code:
            raise SoakError(f"the program ended with exit code {code}:\n{self._read_output()[-_SHOWN:]}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for fd in (self._pieces, self._answers):
            if fd >= 0:
                os.close(fd)
        self._kill_marked()


KINDS: dict[str, type[Host]] = {"notebook": NotebookHost, "program": ProgramHost}
