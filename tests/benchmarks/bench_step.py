"""A training step of a small network, also in bf16 and with accumulated gradients; on one and two ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.benchmarks.subprocesses import two_ranks
from tests.benchmarks.table import Row, compare, interleave

STEPS = 48
BATCH = 32
ROUNDS = 40
TARGETS = {"raw torch": 1.02}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How the network is trained: batches per optimizer step, and precision."""

    label: str
    accumulate: int = 1
    precision: str = "no"


SETTINGS = (
    Setting(label="training step"),
    Setting(label="bf16 step", precision="bf16"),
    Setting(label="batch, 4 a step", accumulate=4),
)


def run() -> list[Row]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = one_rank()
    finally:
        torch.set_num_threads(threads)
    return rows("1 process", alone) + rows("2 processes", two_ranks("bench_step:on_each_rank"))


def rows(where: str, seconds: dict[str, list[float]]) -> list[Row]:
    """Return the rows of all settings; the keys of `seconds` are `label/contender`."""
    found: list[Row] = []
    for setting in SETTINGS:
        own = {
            name.partition("/")[2]: taken
            for name, taken in seconds.items()
            if name.startswith(f"{setting.label}/")
        }
        found += compare(f"{setting.label}, {where}", own, TARGETS, per=STEPS)
    return found


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


def accumulated(model: Any, optimizer: Any, loader: Any, accelerator: Any) -> float:
    """Do the same within `accumulate`."""
    started = time.perf_counter()
    for features, labels in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(features), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return time.perf_counter() - started


def by_hand(model: Any, optimizer: Any, loader: Any, setting: Setting) -> float:
    """Do the same with torch alone: autocast around the forward, no_sync on batches that make no step."""
    started = time.perf_counter()
    for number, (features, labels) in enumerate(loader, start=1):
        due = number % setting.accumulate == 0 or number == len(loader)
        waits = not due and isinstance(model, nn.parallel.DistributedDataParallel)
        quiet: AbstractContextManager[Any] = model.no_sync() if waits else nullcontext()
        with quiet:
            if setting.precision == "bf16":
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    out = model(features)
                out = out.float()
            else:
                out = model(features)
            (nn.functional.cross_entropy(out, labels) / setting.accumulate).backward()
        if due:
            optimizer.step()
            optimizer.zero_grad()
    return time.perf_counter() - started


def prepared(library: Any, world: int, setting: Setting) -> Callable[[], float]:
    accelerator = library.Accelerator(
        cpu=True, mixed_precision=setting.precision, gradient_accumulation_steps=setting.accumulate
    )
    assert accelerator.num_processes == world
    model, optimizer, data = parts(world)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=BATCH))
    assert len(loader) == STEPS
    if setting.accumulate > 1:
        return partial(accumulated, model, optimizer, loader, accelerator)
    return partial(epoch, model, optimizer, loader, accelerator.backward)


def raw(world: int, setting: Setting) -> Callable[[], float]:
    model, optimizer, data = parts(world)
    sampler = None
    if world > 1:
        model = nn.parallel.DistributedDataParallel(model)
        sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    assert len(loader) == STEPS
    if setting.accumulate == 1 and setting.precision == "no":
        return partial(epoch, model, optimizer, loader, torch.Tensor.backward)
    return partial(by_hand, model, optimizer, loader, setting)


def contenders(world: int, setting: Setting) -> dict[str, Callable[[], float]]:
    import accelerate

    import notebook_accel
    from notebook_accel import runtime

    # both take their precision from the first accelerator
    runtime.reset()
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    return {
        "ours": prepared(notebook_accel, world, setting),
        "raw torch": raw(world, setting),
        "accelerate": prepared(accelerate, world, setting),
    }


def one_rank() -> dict[str, list[float]]:
    return {
        f"{setting.label}/{name}": taken
        for setting in SETTINGS
        for name, taken in interleave(contenders(1, setting), rounds=ROUNDS, warmup=5).items()
    }


def on_each_rank() -> dict[str, list[float]]:
    import torch.distributed as dist

    def together(one_round: Callable[[], float]) -> Callable[[], float]:
        def timed() -> float:
            dist.barrier()
            return one_round()

        return timed

    seconds: dict[str, list[float]] = {}
    for setting in SETTINGS:
        made = contenders(2, setting)
        taken = interleave({name: together(made[name]) for name in made}, rounds=ROUNDS, warmup=5)
        seconds |= {f"{setting.label}/{name}": times for name, times in taken.items()}
    dist.barrier()
    dist.destroy_process_group()
    return seconds
