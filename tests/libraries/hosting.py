"""A program: imports libraries once, and forks the processes of each job that it is told; see `hosts`.

A fork copies memory but not threads, so this process has one thread and no process group. It reads a job a line from
its standard input, writes an answer a line to its standard output, and ends with its input.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

OURS = "notebook_accel"
PORT_BYTES = 5


def main() -> None:
    """Serve jobs until the input ends."""
    side, *left_out = sys.argv[1:]
    commands, answers = os.dup(0), os.dup(1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # what libraries print belongs in the log
    for name in left_out:
        sys.modules[name] = None  # type: ignore[assignment]
    import torch

    torch.set_num_threads(1)
    check_side(side)
    while line := read_line(commands):
        try:
            answer = Job(json.loads(line), commands, answers).run()
        except Exception:
            answer = {"error": traceback.format_exc()}
        os.write(answers, json.dumps(answer).encode() + b"\n")


def check_side(side: str) -> None:
    """Raise unless `accelerate` is the one of a side."""
    import accelerate

    if (OURS in str(accelerate.__file__)) is not (side == "ours"):
        raise RuntimeError(f"a host for {side!r} has Accelerate from {accelerate.__file__}")


def read_line(descriptor: int) -> bytes:
    """Return the next line; an empty one at the end."""
    data = b""
    while not data.endswith(b"\n"):
        more = os.read(descriptor, 1 << 16)
        if not more:
            return b""
        data += more
    return data


class Job:
    """The processes of one job.

    Args:
        fields: those of `hosts.Job`.
        commands: descriptor that says nothing until the job is done; at its end the processes are killed.
        answers: descriptor that the processes do without.
    """

    def __init__(self, fields: dict[str, Any], commands: int, answers: int) -> None:
        self.fields = fields
        self.number = int(fields["number"])
        self.folder = Path(fields["folder"])
        self.commands = commands
        self.answers = answers
        self.port, self.ended = os.pipe(), os.pipe()

    def run(self) -> dict[str, Any]:
        """Fork the processes, wait until they have ended, and return their exit codes."""
        try:
            for name in self.fields["libraries"]:
                load(name)
            gc.collect()
            gc.freeze()
            refuse_threads()
            return self.wait([fork(lambda rank=rank: self.work(rank)) for rank in range(self.number)])
        finally:
            for descriptor in (*self.port, *self.ended):
                os.close(descriptor)

    def wait(self, pids: Sequence[int]) -> dict[str, Any]:
        """Wait for processes; after the first that fails, or at the limit, the others are killed."""
        deadline = time.monotonic() + float(self.fields["seconds"])
        codes: dict[int, int] = {}
        watched = {os.pidfd_open(pid): pid for pid in pids}
        try:
            while len(codes) < len(pids):
                left = max(0.0, deadline - time.monotonic())
                ready, _, _ = select.select([*watched, self.commands], [], [], left)
                for descriptor in set(ready) & watched.keys():
                    pid = watched.pop(descriptor)
                    os.close(descriptor)
                    codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                if not ready or self.commands in ready or any(codes.values()):
                    codes |= kill(set(pids) - codes.keys())
        finally:
            for descriptor in watched:
                os.close(descriptor)
        return {"codes": [codes[pid] for pid in pids], "is_late": time.monotonic() > deadline}

    def work(self, rank: int) -> None:
        """Run the job's function as one of its processes."""
        with open(self.folder / "output.txt", "a", buffering=1) as output:
            for descriptor in (1, 2):
                os.dup2(output.fileno(), descriptor)
        for descriptor in (self.commands, self.answers):
            os.close(descriptor)
        os.chdir(self.folder)
        os.environ.update(self.fields["variables"])
        store = self.meet(rank)
        module, _, name = self.fields["function"].partition(":")
        getattr(importlib.import_module(module), name)(*self.fields["arguments"])
        self.part(rank)
        del store

    def meet(self, rank: int) -> Any:
        """Set the variables of torch's launchers; the first process has the store, at a port that the system chose."""
        if self.number == 1:
            return None
        store = None
        if rank == 0:
            from torch.distributed import TCPStore

            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = f"{store.port:{PORT_BYTES}}".encode()
            os.write(self.port[1], port * (self.number - 1))
        else:
            port = os.read(self.port[0], PORT_BYTES)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.number),
            "LOCAL_WORLD_SIZE": str(self.number),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port.decode().strip(),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # nobody else shall open the store
        }
        return store

    def part(self, rank: int) -> None:
        """Keep the store until no process needs it any more; the host ends who waits for one that failed."""
        if rank > 0:
            os.write(self.ended[1], b".")
        else:
            for _ in range(self.number - 1):
                os.read(self.ended[0], 1)


def load(name: str) -> None:
    """Import a module, or with `module:name` what it hands out under a name."""
    module, _, attribute = name.partition(":")
    found = importlib.import_module(module)
    if attribute:
        getattr(found, attribute)


def refuse_threads() -> None:
    """Raise if a fork would lose threads or share a process group."""
    from torch import distributed

    names = [
        Path("/proc/self/task", task, "comm").read_text().strip() for task in os.listdir("/proc/self/task")
    ]
    if len(names) > 1 or distributed.is_initialized():
        group = "a process group" if distributed.is_initialized() else "no process group"
        raise RuntimeError(f"a process with the threads {names} and {group} cannot be forked")


def fork(work: Callable[[], None]) -> int:
    """Return the id of a new process that does some work and ends as a Python program does."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def kill(pids: set[int]) -> dict[int, int]:
    """Kill children of this process and what they have started, and return their exit codes."""
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            for one in (*process.children(recursive=True), process):
                with contextlib.suppress(psutil.Error):
                    one.kill()
    return {pid: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids}


if __name__ == "__main__":
    main()
