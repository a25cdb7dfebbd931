"""The view of a run in a kernel: an update of 8 ranks, and what it costs a training, also of ranks that print much."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmarks.table import Row, compare, interleave
from tests.notebooks.kernel import Kernel

RANKS = 8
ROUNDS = 40
TRAINING_ROUNDS = 7
LINES = 4000
STEPS = 600
MOST_SECONDS = 0.003


def run() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        kernel = Kernel(Path(folder))
        try:
            kernel.run("from tests.benchmarks import bench_view").ok()
            return updates(kernel) + steps(kernel) + printing(kernel)
        finally:
            kernel.close()


def updates(kernel: Kernel) -> list[Row]:
    """Time updates in which everything changed, beside ones in which nothing did, and the time that one may take."""
    kernel.run("changed, same = bench_view.made()").ok()
    seconds = interleave(
        {
            "ours": lambda: number(kernel, "changed()"),
            "an update without news": lambda: number(kernel, "same()"),
            "3 ms": lambda: MOST_SECONDS,
        },
        rounds=ROUNDS,
        warmup=5,
    )
    return compare(f"update of the view, {RANKS} ranks", seconds, {"3 ms": 1.0})


def steps(kernel: Kernel) -> list[Row]:
    """Time a training step of two ranks that report every tenth, with the view and without."""
    seconds = interleave(
        {
            "ours": lambda: number(kernel, "bench_view.trained('widget')"),
            "no view": lambda: number(kernel, "bench_view.trained('none')"),
        },
        rounds=TRAINING_ROUNDS,
    )
    return compare("training step of 2 ranks", seconds, {"no view": 1.02})


def printing(kernel: Kernel) -> list[Row]:
    """Time a step of ranks that print 2,000 lines a second each, with the view and without."""
    seconds = interleave(
        {
            "ours": lambda: number(kernel, "bench_view.printed('widget')"),
            "no view": lambda: number(kernel, "bench_view.printed('none')"),
        },
        rounds=TRAINING_ROUNDS,
    )
    return compare(f"training of {RANKS} ranks that print", seconds, {"no view": 1.05})


def number(kernel: Kernel, code: str) -> float:
    """Run code in the kernel and return the number that it gives."""
    return float(kernel.run(code, timeout=120).ok().value)


def made() -> tuple[Callable[[], float], Callable[[], float]]:
    """In the kernel: return an update in which all ranks tell news of every kind, and one without any."""
    from IPython.display import display

    from notebook_accel.launch.engines.inprocess import InProcessEngine
    from notebook_accel.launch.run import Run
    from notebook_accel.widgets.run.panel import Panel
    from notebook_accel.widgets.run.picture import Usage, make_picture
    from tests.unit.jobs import make_job

    live = Run(make_job(made, RANKS), InProcessEngine())
    panel = Panel(lambda: None)
    display(panel.box)
    usage = {rank: Usage(memory=rank << 28, cpu=99.0) for rank in range(RANKS)}
    told = 0

    def changed() -> float:
        nonlocal told
        for _ in range(100):
            told += 1
            for event in _news(told):
                live.record.apply(event)
        return same()

    def same() -> float:
        started = time.perf_counter()
        panel.show(make_picture(live, usage))
        return time.perf_counter() - started

    return changed, same


def _news(step: int) -> list[Any]:
    from notebook_accel.events import Lines, Metric, Phase, Pulse

    now = time.time()
    found: list[Any] = [
        Metric(rank=0, time=now, step=step, values={"loss": 1 / step, "accuracy": 1 - 1 / step})
    ]
    for rank in range(RANKS):
        found.append(Phase(rank=rank, time=now, name="running", pid=rank))
        found.append(Pulse(rank=rank, time=now, steps=step, epoch=1, batch=step % 100, batches=100))
        for stream in ("stdout", "stderr"):
            text = f"step {step}: loss 0.1234 of rank {rank}, and some more words"
            found.append(Lines(rank=rank, time=now, stream=stream, texts=(text,)))
    return found


def trained(view: Any) -> float:
    """In the kernel: launch two ranks that train; return the mean seconds of a step."""
    return _mean_of_ranks(_train, 2, view)


def printed(view: Any) -> float:
    """In the kernel: launch ranks that compute and print; return the mean seconds of a step."""
    return _mean_of_ranks(_print_much, RANKS, view)


def _mean_of_ranks(function: Callable[[], float], ranks: int, view: Any) -> float:
    from notebook_accel import notebook_launcher

    run = notebook_launcher(function, num_processes=ranks, returns="all", block=False, view=view)
    values = run.result()
    return float(sum(values) / len(values))


def _train() -> float:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from notebook_accel import Accelerator, print_metrics

    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    data = TensorDataset(torch.rand(STEPS * 128, 256), torch.randint(0, 10, (STEPS * 128,)))
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(data, batch_size=64)
    )
    started = time.perf_counter()
    for number, (features, labels) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(features), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if number % 10 == 0:
            print_metrics(step=number, loss=loss.detach())
    return (time.perf_counter() - started) / len(loader)


def _print_much() -> float:
    import torch

    matrix, steps = torch.rand(64, 64), 0
    started = time.perf_counter()
    for number in range(LINES):
        while time.perf_counter() < started + number / 2000:
            matrix = (matrix @ matrix).tanh()
            steps += 1
        print(f"step {number}: loss {number / LINES:.4f}, and some more words that a training may print")
    return (time.perf_counter() - started) / steps
