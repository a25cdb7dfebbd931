"""A training step of a small network: loader, forward, loss, backward, step, zero_grad; on one and two ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.benchmarks.subprocesses import two_ranks
from tests.benchmarks.table import Row, compare, interleave

STEPS = 48
BATCH = 32
ROUNDS = 40
TARGETS = {"raw torch": 1.05}


def run() -> list[Row]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = compare("training step, 1 process", one_rank(), TARGETS, per=STEPS)
    finally:
        torch.set_num_threads(threads)
    return rows + compare(
        "training step, 2 processes", two_ranks("bench_step:on_each_rank"), TARGETS, per=STEPS
    )


def parts(world: int = 1) -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    samples = STEPS * BATCH * world
    data = TensorDataset(torch.rand(samples, 64), torch.randint(0, 10, (samples,)))
    return model, torch.optim.SGD(model.parameters(), lr=0.01), data


def epoch(model: Any, optimizer: Any, loader: Any, backward: Callable[[torch.Tensor], object]) -> float:
    """Train on every batch; return the seconds."""
    started = time.perf_counter()
    for features, labels in loader:
        loss = nn.functional.cross_entropy(model(features), labels)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - started


def prepared(library: Any, world: int) -> Callable[[], float]:
    accelerator = library.Accelerator(cpu=True)
    assert accelerator.num_processes == world
    model, optimizer, data = parts(world)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=BATCH))
    assert len(loader) == STEPS
    return lambda: epoch(model, optimizer, loader, accelerator.backward)


def raw(world: int) -> Callable[[], float]:
    model, optimizer, data = parts(world)
    sampler = None
    if world > 1:
        model = nn.parallel.DistributedDataParallel(model)
        sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    assert len(loader) == STEPS
    return lambda: epoch(model, optimizer, loader, torch.Tensor.backward)


def contenders(world: int) -> dict[str, Callable[[], float]]:
    import accelerate

    import notebook_accel

    return {
        "ours": prepared(notebook_accel, world),
        "raw torch": raw(world),
        "accelerate": prepared(accelerate, world),
    }


def one_rank() -> dict[str, list[float]]:
    return interleave(contenders(1), rounds=ROUNDS, warmup=5)


def on_each_rank() -> dict[str, list[float]]:
    import torch.distributed as dist

    made = contenders(2)

    def together(one_round: Callable[[], float]) -> Callable[[], float]:
        def timed() -> float:
            dist.barrier()
            return one_round()

        return timed

    seconds = interleave({name: together(made[name]) for name in made}, rounds=ROUNDS, warmup=5)
    dist.barrier()
    dist.destroy_process_group()
    return seconds
