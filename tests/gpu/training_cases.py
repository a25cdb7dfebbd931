"""Cases of training with whole models: losses, precision, random states, loaders, memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from notebook_accel import Accelerator, DataLoaderConfiguration, find_executable_batch_size
from notebook_accel.dtensors import is_sharded, to_local
from notebook_accel.handlers import GradScalerKwargs
from tests.gpu.cases import Unavailable, case, expect_close, make

STEPS = 4
ROWS = 8
WIDTH = 16
MIB = 1 << 20


def build(width: int = WIDTH, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(width, 4 * width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(4 * width, 1)]
    return nn.Sequential(*layers)


def rows(count: int = ROWS * STEPS) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(2))
    return drawn, drawn.sum(1, keepdim=True)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().mean()


def train_alone(device: torch.device, steps: int = STEPS) -> list[float]:
    """Return the losses that one process has on whole batches, without this package."""
    model = build().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x, y in zip(*(part.to(device).split(ROWS) for part in rows(ROWS * steps)), strict=True):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(accelerator: Accelerator, prepared: Any, optimizer: Any, loader: Any) -> list[float]:
    """Return the mean losses of all ranks."""
    losses = []
    for x, y in loader:
        loss = loss_of(prepared, x, y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


def prepare(accelerator: Accelerator, model: nn.Module | None = None) -> tuple[Any, Any, Any]:
    built = build() if model is None else model
    optimizer = torch.optim.AdamW(built.parameters(), lr=1e-2)
    batches = DataLoader(TensorDataset(*rows()), batch_size=ROWS // accelerator.num_processes)
    prepared: tuple[Any, Any, Any] = accelerator.prepare(built, optimizer, batches)
    return prepared


@case()
def losses_of_one_process(folder: Path) -> None:
    accelerator = make()
    expect_close(train(accelerator, *prepare(accelerator)), train_alone(accelerator.device))


@case()
def compiled_model(folder: Path) -> None:
    on_gpu = accelerator_kind() == "cuda"
    if on_gpu and shutil.which("cc") is None and shutil.which("gcc") is None:
        raise Unavailable("needs a C compiler, which Triton calls")
    accelerator = make(dynamo_backend="inductor" if on_gpu else "aot_eager")
    model, optimizer, loader = prepare(accelerator)
    expect_close(train(accelerator, model, optimizer, loader), train_alone(accelerator.device), 1e-2)
    torch.compiler.reset()


def accelerator_kind() -> str:
    return make().device.type


@case()
def accumulated_gradients(folder: Path) -> None:
    accelerator = make(gradient_accumulation_steps=2)
    model, optimizer, loader = prepare(accelerator)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for number, (x, y) in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, x, y))
            optimizer.step()
            optimizer.zero_grad()
        changed = not torch.equal(before[0], next(model.parameters()))
        assert changed == (number >= 1), number
    weights = accelerator.gather(next(model.parameters()).detach()[None])
    assert all(torch.equal(other, weights[0]) for other in weights), "all ranks have the same weights"


def check_skipped(accelerator: Accelerator, optimizer: Any, compute: Callable[[], torch.Tensor]) -> None:
    """Let the last rank overflow in the second of three steps, and check that all ranks skip it, and no other.

    Where gradients are averaged over the ranks, its loss is infinite. Else one value of its part of them is.

    Args:
        accelerator: trains in fp16 with `SCALING`.
        optimizer: prepared.
        compute: returns the loss.
    """
    found = []
    for step in range(3):
        overflows = step == 1 and accelerator.process_index == accelerator.num_processes - 1
        whole = not is_sharded(optimizer.param_groups[0]["params"][0])
        loss = compute()
        accelerator.backward(loss * float("inf") if overflows and whole else loss)
        if overflows and not whole:
            to_local(optimizer.param_groups[0]["params"][0].grad).view(-1)[0] = float("inf")
        optimizer.step()
        optimizer.zero_grad()
        skipped = torch.tensor([int(accelerator.optimizer_step_was_skipped)], device=accelerator.device)
        found.append(accelerator.gather(skipped).tolist())
    assert torch.isfinite(accelerator.reduce(compute().detach(), "sum"))
    size = accelerator.num_processes
    assert found == [[0] * size, [1] * size, [0] * size], found
    assert accelerator.scaler is not None and accelerator.scaler.get_scale() == 2.0**5


SCALING = GradScalerKwargs(init_scale=2.0**6)


@case()
def overflow_in_one_rank(folder: Path) -> None:
    accelerator = make(mixed_precision="fp16", kwargs_handlers=[SCALING])
    model, optimizer, _ = prepare(accelerator)
    x, y = (part.to(accelerator.device) for part in rows(ROWS))
    check_skipped(accelerator, optimizer, lambda: loss_of(model, x, y))


@case()
def dropout_after_a_resume(folder: Path) -> None:
    accelerator = make()
    torch.manual_seed(3 + accelerator.process_index)
    model, optimizer, loader = prepare(accelerator, build(dropout=0.5))
    train(accelerator, model, optimizer, loader)
    accelerator.save_state(str(folder / "saved"))
    first = train(accelerator, model, optimizer, loader)
    drawn = torch.rand(3, device=accelerator.device)
    accelerator.load_state(str(folder / "saved"))
    expect_close(train(accelerator, model, optimizer, loader), first, 1e-6)
    assert len(set(first)) == STEPS
    assert torch.equal(torch.rand(3, device=accelerator.device), drawn)


@case()
def loaders_with_processes_and_pinned_memory(folder: Path) -> None:
    accelerator = make(dataloader_config=DataLoaderConfiguration(non_blocking=True))
    numbers = torch.arange(64 * 4096, dtype=torch.float32).reshape(64, 4096)
    plain = DataLoader(
        numbers,
        batch_size=8 // accelerator.num_processes,
        num_workers=2,
        pin_memory=accelerator.device.type == "cuda",
        persistent_workers=True,
    )
    loader = accelerator.prepare(plain)
    for _ in range(2):
        sums = []
        for batch in loader:
            assert batch.device == accelerator.device
            sums.append(accelerator.gather(batch.double().sum(1)))  # reads it before the next one is sent
            del batch
        assert torch.equal(torch.cat(sums).cpu(), numbers.double().sum(1))
    del loader, plain


@case(cuda=True, most=1)
def batch_size_that_fits(folder: Path) -> None:
    device = make().device
    tried: list[int] = []
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    held, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    torch.cuda.set_per_process_memory_fraction((reserved + 96 * MIB) / total, device)

    @find_executable_batch_size(starting_batch_size=16)
    def fill(batch_size: int) -> int:
        tried.append(batch_size)
        kept = [torch.empty(10 * MIB, dtype=torch.uint8, device=device) for _ in range(batch_size)]
        return len(kept)

    try:
        assert fill() == tried[-1] < 10 and len(tried) > 1
        assert fill() == tried[-1], "a later call starts with the size that worked"
        assert torch.cuda.memory_allocated(device) == held, "what failed is free"
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


@case()
def saved_in_the_background(folder: Path) -> None:
    accelerator = make()
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(16)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(1, 1024, device=accelerator.device)).sum())
    optimizer.step()
    expected = next(model.parameters()).detach().clone()
    on_gpu = accelerator.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    accelerator.save_state(str(folder / "saved"), async_save=True)
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    accelerator.backward(model(torch.ones(1, 1024, device=accelerator.device)).sum())
    optimizer.step()  # while it is written
    accelerator.end_training()
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    assert peak - before < gradients // 4, (
        f"{(peak - before) / MIB:.0f} MiB more than the {before / MIB:.0f} before"
    )
    assert not torch.equal(next(model.parameters()), expected)
    accelerator.load_state(str(folder / "saved"))
    assert torch.equal(next(model.parameters()), expected), "what was there when it was asked for"
