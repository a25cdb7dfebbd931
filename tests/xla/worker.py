"""A process whose runtime of torch_xla is set up in one way, since a process can do that once.

Started as a program it calls functions of `tests.xla.programs`, one for each line of JSON it reads, and answers with
a line each.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Worker:
    """The other end of the process; its temp files go to `folder`; `env` says how its runtime is set up."""

    def __init__(self, folder: Path, devices: int, **env: str) -> None:
        self.devices = devices
        own = {"ACCELERATE_TORCH_DEVICE": "xla", "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices)}
        own |= {"TF_CPP_MIN_LOG_LEVEL": "2", "TMPDIR": str(folder)}
        own["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.xla.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
            env={**os.environ, **own, **env},
        )

    def call(self, name: str, *args: Any) -> Any:
        """Return what the function returns; AssertionError with its traceback where it fails."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, args]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the worker ended in {name}, with code {self._process.wait(30)}"
        answer = json.loads(line)
        assert answer["error"] is None, answer["error"]
        return answer["result"]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the functions print is no answer
    programs = importlib.import_module("tests.xla.programs")
    for line in sys.stdin:
        name, args = json.loads(line)
        try:
            answer = {"result": programs.run(name, args), "error": None}
        except Exception:
            answer = {"result": None, "error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
