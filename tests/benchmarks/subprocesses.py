"""Contenders that live in processes of their own: one each (`Contender`), or two ranks (`two_ranks`)."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]
# One thread a process, because two processes share the cores; Accelerate forms a CPU group only when told to.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}


class Contender:
    """A long-lived process in which `module:function` makes a round, which is then run on demand.

    `prefix` are words before its command.
    """

    def __init__(self, target: str, prefix: Sequence[str] = ()) -> None:
        command = [*prefix, sys.executable, "-m", "tests.benchmarks.subprocesses", target]
        self.target = target
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self) -> float:
        """Run one round there and return its seconds."""
        assert self.process.stdin and self.process.stdout
        print("round", file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.target} ended with code {self.process.wait()}")
        return float(json.loads(answer))

    def __enter__(self) -> Contender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.communicate(timeout=30)


def find(target: str) -> Callable[..., object]:
    """Return the function that `module:function` of this folder names."""
    module, _, name = target.partition(":")
    found = getattr(importlib.import_module(f"tests.benchmarks.{module}"), name)
    assert callable(found)
    return found


def two_ranks(target: str) -> dict[str, list[float]]:
    """Run `module:function` on two ranks under torchrun; return rank 0's seconds by contender."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    command += ["-m", "tests.benchmarks.subprocesses", "--rank", target]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, text=True, check=True
    )
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    assert isinstance(answer, dict)
    return answer


def main(arguments: list[str]) -> None:
    answers = os.fdopen(os.dup(1), "w")  # what the contender prints is of no interest here
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if arguments[0] == "--rank":
        result = find(arguments[1])()
        if os.environ["RANK"] == "0":
            print(json.dumps(result), file=answers, flush=True)
        os._exit(0)  # torch aborts some exits where anything still refers to a process group
    one_round = find(arguments[0])()
    assert callable(one_round)
    for _ in sys.stdin:
        print(json.dumps(one_round()), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
