"""Launch of two workers from a process that stays as clean as a new kernel: a gather; an optimizer."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

from tests.benchmarks.subprocesses import Contender
from tests.benchmarks.table import Row, compare, interleave
from tests.ports import free_port

ROUNDS = 9
OPTIMIZER_ROUNDS = 3


def run() -> list[Row]:
    return gather() + optimizer()


def gather() -> list[Row]:
    with contextlib.ExitStack() as stack:
        makers = {"ours": "ours", "accelerate": "accelerate", "two bare forks": "bare_forks"}
        contenders = {
            name: stack.enter_context(Contender(f"bench_launch:{maker}")) for name, maker in makers.items()
        }
        seconds = interleave(contenders, rounds=ROUNDS, warmup=2)
    return compare("launch of 2 workers, one gather", seconds, {"accelerate": 0.5, "two bare forks": 1.3})


def optimizer() -> list[Row]:
    """Compare launches after the first one, which imports what an optimizer needs."""
    with contextlib.ExitStack() as stack:
        makers = {"ours": "ours_optimizer", "accelerate": "accelerate_optimizer"}
        contenders = {
            name: stack.enter_context(Contender(f"bench_launch:{maker}")) for name, maker in makers.items()
        }
        seconds = interleave(contenders, rounds=OPTIMIZER_ROUNDS, warmup=1)
    return compare("second launch that makes an optimizer", seconds, {"accelerate": 0.25})


def ours() -> Callable[[], float]:
    import notebook_accel

    return lambda: launch(notebook_accel)


def ours_optimizer() -> Callable[[], float]:
    import notebook_accel

    return lambda: launch_optimizer(notebook_accel)


def accelerate_optimizer() -> Callable[[], float]:
    import accelerate as reference

    return lambda: launch_optimizer(reference)


def accelerate() -> Callable[[], float]:
    import accelerate as reference

    return lambda: launch(reference)


def launch(library: Any) -> float:
    def work() -> None:
        import torch

        accelerator = library.Accelerator()
        everyone = accelerator.gather(torch.tensor([accelerator.process_index]))
        assert everyone.tolist() == [0, 1]

    return timed(library, work)


def launch_optimizer(library: Any) -> float:
    def work() -> None:
        import torch

        library.Accelerator()
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)

    return timed(library, work)


def timed(library: Any, work: Callable[[], None]) -> float:
    started = time.perf_counter()
    library.notebook_launcher(work, num_processes=2, use_port=str(free_port()))
    return time.perf_counter() - started


def bare_forks() -> Callable[[], float]:
    """The least that any launcher has to do: fork twice, form a group, gather, wait."""
    import torch
    import torch.distributed as dist

    def worker(rank: int, port: int) -> None:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        slots = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(slots, torch.tensor([rank]))
        assert torch.cat(slots).tolist() == [0, 1]
        dist.destroy_process_group()

    def one_round() -> float:
        started = time.perf_counter()
        port = free_port()
        pids = []
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    worker(rank, port)
                    code = 0
                finally:
                    os._exit(code)
            pids.append(pid)
        assert all(os.waitpid(pid, 0)[1] == 0 for pid in pids)
        return time.perf_counter() - started

    return one_round
