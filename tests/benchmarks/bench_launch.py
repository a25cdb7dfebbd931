"""Launch of two workers from a process that stays as clean as a new kernel: nothing, a gather, an optimizer."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from tests.benchmarks.subprocesses import Contender
from tests.benchmarks.table import Row, compare, interleave
from tests.ports import free_port

ROUNDS = 9
OPTIMIZER_ROUNDS = 3


def run() -> list[Row]:
    """Return rows against Accelerate, which forks; what an optimizer needs is imported by the launch before."""
    rows = []
    for ours in ("forked", "fresh"):
        empty = time_all({"ours": f"{ours}_empty", "accelerate": "accelerate_empty"}, ROUNDS)
        rows += compare(f"launch of 2 empty workers, {ours}", empty, {"accelerate": 0.35})
        makers = {"ours": f"{ours}_gather", "accelerate": "accelerate_gather", "two bare forks": "bare_forks"}
        targets = {"accelerate": 0.45, "two bare forks": 1.3 if ours == "forked" else None}
        rows += compare(f"launch of 2 workers, one gather, {ours}", time_all(makers, ROUNDS), targets)
    makers = {"ours": "forked_optimizer", "accelerate": "accelerate_optimizer"}
    steps = time_all(makers, OPTIMIZER_ROUNDS)
    return rows + compare("second launch that makes an optimizer", steps, {"accelerate": 0.25})


def time_all(makers: Mapping[str, str], rounds: int) -> dict[str, list[float]]:
    with contextlib.ExitStack() as stack:
        contenders = {
            name: stack.enter_context(Contender(f"bench_launch:{maker}")) for name, maker in makers.items()
        }
        return interleave(contenders, rounds=rounds, warmup=2)


def empty(library: Any) -> None:
    pass


def gather(library: Any) -> None:
    import torch

    accelerator = library.Accelerator()
    everyone = accelerator.gather(torch.tensor([accelerator.process_index]))
    assert everyone.tolist() == [0, 1]


def optimizer(library: Any) -> None:
    import torch

    library.Accelerator()
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


def forked_empty() -> Callable[[], float]:
    return ours(empty, "fork")


def fresh_empty() -> Callable[[], float]:
    return ours(empty, "fresh")


def forked_gather() -> Callable[[], float]:
    return ours(gather, "fork")


def fresh_gather() -> Callable[[], float]:
    return ours(gather, "fresh")


def forked_optimizer() -> Callable[[], float]:
    return ours(optimizer, "fork")


def accelerate_empty() -> Callable[[], float]:
    return accelerate(empty)


def accelerate_gather() -> Callable[[], float]:
    return accelerate(gather)


def accelerate_optimizer() -> Callable[[], float]:
    return accelerate(optimizer)


def ours(work: Callable[[Any], None], start_method: str) -> Callable[[], float]:
    import notebook_accel

    return lambda: launch(notebook_accel, work, start_method=start_method)


def accelerate(work: Callable[[Any], None]) -> Callable[[], float]:
    import accelerate as reference

    return lambda: launch(reference, work)


def launch(library: Any, work: Callable[[Any], None], **options: str) -> float:
    started = time.perf_counter()
    library.notebook_launcher(work, (library,), num_processes=2, use_port=str(free_port()), **options)
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
