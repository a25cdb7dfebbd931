"""What the workers of these tests run: training on XLA devices, and the same in plain torch on the CPU."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch_xla
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from notebook_accel import Accelerator, DataLoaderConfiguration, load_checkpoint_in_model, runtime
from notebook_accel.nested import flatten
from notebook_accel.seeding import set_seed, synchronize_rng_state
from notebook_accel.state import GradientState


def run(name: str, args: list[Any]) -> Any:
    """Call a function of this module or of `rank_programs` with no runtime of ours before and after."""
    runtime.reset()
    try:
        here = globals()
        found = here if name in here else vars(importlib.import_module("tests.xla.rank_programs"))
        return found[name](*args)
    finally:
        runtime.reset()


def _digits() -> tuple[TensorDataset, TensorDataset]:
    pixels, labels = load_digits(return_X_y=True)
    pictures = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    answers = torch.tensor(labels)
    return TensorDataset(pictures[:1437], answers[:1437]), TensorDataset(pictures[1437:], answers[1437:])


def _cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, 10),
    )


def row_data(count: int = 40) -> TensorDataset:
    made = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 4, generator=made), torch.randn(count, 1, generator=made))


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def _numbers(model: nn.Module) -> list[float]:
    return [
        value for parameter in model.parameters() for value in parameter.detach().cpu().flatten().tolist()
    ]


class Plain:
    """What an accelerator does, in plain torch on the CPU."""

    def __init__(self, steps: int = 1) -> None:
        self.steps = steps

    def epoch(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: DataLoader[Any],
        loss_of: Callable[..., torch.Tensor],
        *,
        clip: float | None = None,
        scheduler: Any = None,
    ) -> list[float]:
        losses = []
        for number, (inputs, targets) in enumerate(batches, 1):
            loss = loss_of(model(inputs), targets)
            (loss / self.steps).backward()
            losses.append(loss.item())
            if number % self.steps == 0 or number == len(batches):
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
                if scheduler is not None:
                    scheduler.step()
        return losses


def _epoch(
    accelerator: Accelerator,
    model: Any,
    optimizer: Any,
    batches: Any,
    loss_of: Callable[..., torch.Tensor],
    *,
    clip: float | None = None,
    scheduler: Any = None,
) -> list[float]:
    losses = []
    for inputs, targets in batches:
        with accelerator.accumulate(model):
            loss = loss_of(model(inputs), targets)
            accelerator.backward(loss)
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def place() -> dict[str, Any]:
    """What the state says of this process."""
    accelerator = Accelerator()
    return {
        "type": accelerator.distributed_type.value,
        "device": str(accelerator.device),
        "processes": accelerator.num_processes,
        "main": accelerator.is_main_process,
        "backend": accelerator.state.backend,
        "strategy": type(accelerator._strategy).__name__,
    }


def digits() -> dict[str, Any]:
    """Train 30 steps, the last batch being smaller, and look at the test set."""
    train_set, test_set = _digits()
    loss_of = nn.functional.cross_entropy
    plain = _cnn()
    optimizer = torch.optim.Adam(plain.parameters(), lr=2e-3)
    order = torch.Generator().manual_seed(3)
    expected = Plain().epoch(
        plain, optimizer, DataLoader(train_set, 48, shuffle=True, generator=order), loss_of
    )
    plain.eval()
    answers = torch.cat([plain(pictures).argmax(1) for pictures, _ in DataLoader(test_set, 64)])

    accelerator = Accelerator()
    model = _cnn()
    order = torch.Generator().manual_seed(3)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model,
        torch.optim.Adam(model.parameters(), lr=2e-3),
        DataLoader(train_set, 48, shuffle=True, generator=order),
        DataLoader(test_set, 64),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = _epoch(accelerator, model, optimizer, train_loader, loss_of)
    model.eval()
    guesses, truth = [], []
    for pictures, labels in test_loader:
        with torch.no_grad():
            found = model(pictures).argmax(dim=1)
        found, labels = accelerator.gather_for_metrics((found, labels))
        guesses.append(found.cpu())
        truth.append(labels.cpu())
    return {
        "losses": losses,
        "expected": expected,
        "weights": _numbers(model),
        "expected_weights": _numbers(plain),
        "means": model[1].running_mean.cpu().tolist(),
        "expected_means": plain[1].running_mean.tolist(),
        "same_answers": int((torch.cat(guesses) == answers).sum()),
        "truth": torch.equal(torch.cat(truth), test_set.tensors[1]),
        "tested": len(test_set),
        "split": str(torch_xla._XLAC._get_xla_sharding_spec(pictures)),
        "advice": [str(entry.message) for entry in caught if "is compiled" in str(entry.message)],
    }


def accumulation(clip: float | None) -> dict[str, Any]:
    """Train two epochs of 10 batches, 4 to a step, with a schedule."""
    loss_of = nn.functional.mse_loss
    plain = small()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    expected, rates = [], []
    for _ in range(2):
        batches = DataLoader(row_data(), 4)
        expected += Plain(4).epoch(plain, optimizer, batches, loss_of, clip=clip, scheduler=scheduler)
        rates += scheduler.get_last_lr()

    accelerator = Accelerator(gradient_accumulation_steps=4)
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer, scheduler, loader = accelerator.prepare(
        model, optimizer, scheduler, DataLoader(row_data(), 4)
    )
    losses, found = [], []
    for _ in range(2):
        losses += _epoch(accelerator, model, optimizer, loader, loss_of, clip=clip, scheduler=scheduler)
        found += scheduler.get_last_lr()
    return {
        "losses": losses,
        "expected": expected,
        "weights": _numbers(model),
        "expected_weights": _numbers(plain),
        "rates": found,
        "expected_rates": rates,
        "steps": runtime.current().gradient.steps,  # type: ignore[union-attr]
    }


def clipping() -> dict[str, Any]:
    """Clip once by norm and once by value, and look at the flag that says so."""
    plain, accelerator = small(), Accelerator()
    model = small()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs, targets = row_data()[:]
    nn.functional.mse_loss(plain(inputs), targets).backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    state, device = GradientState(), accelerator.device
    flags = [state.is_xla_gradients_synced]
    accelerator.backward(nn.functional.mse_loss(model(inputs.to(device)), targets.to(device)))
    found = accelerator.clip_grad_norm_(model.parameters(), 0.01)
    flags.append(state.is_xla_gradients_synced)
    clipped = [parameter.grad.cpu().tolist() for parameter in model.parameters()]
    optimizer.step()
    flags.append(state.is_xla_gradients_synced)
    accelerator.clip_grad_value_(model.parameters(), 1e-4)
    largest = max(float(parameter.grad.abs().max()) for parameter in model.parameters())
    expected = [parameter.grad.tolist() for parameter in plain.parameters() if parameter.grad is not None]
    return {
        "norms": [float(found), float(norm)],
        "clipped": flatten(clipped).leaves,
        "expected": flatten(expected).leaves,
        "flags": flags,
        "largest": largest,
    }


class _Seen(nn.Module):
    """Notes the format in which its layer computes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.formats: list[str] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.model(inputs)
        self.formats.append(str(outputs.dtype))
        return outputs


def bfloat16() -> dict[str, Any]:
    """Train 5 steps in bf16, and in float32 on the CPU."""
    plain = small()
    expected = Plain().epoch(
        plain, torch.optim.SGD(plain.parameters(), lr=0.1), DataLoader(row_data(), 8), nn.functional.mse_loss
    )
    accelerator = Accelerator(mixed_precision="bf16")
    seen = _Seen(small())
    model, optimizer, loader = accelerator.prepare(
        seen, torch.optim.SGD(seen.parameters(), lr=0.1), DataLoader(row_data(), 8)
    )
    losses = _epoch(accelerator, model, optimizer, loader, nn.functional.mse_loss)
    outputs = model(torch.zeros(2, 4, device=accelerator.device))
    return {
        "losses": losses,
        "expected": expected,
        "inside": sorted(set(seen.formats)),
        "outside": str(outputs.dtype),
        "weights": str(next(model.parameters()).dtype),
    }


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.decoder(torch.tanh(self.encoder(inputs)))
        return outputs


def distance(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((outputs - targets) ** 2).mean()


def tied_weights(folder: str) -> dict[str, Any]:
    """Train a model two of whose layers share their weights, save it, and load it into an untied one."""
    plain = _Tied()
    expected = Plain().epoch(
        plain, torch.optim.Adam(plain.parameters(), lr=0.1), DataLoader(row_data(), 8), distance
    )
    accelerator = Accelerator()
    made = _Tied()
    model, optimizer, loader = accelerator.prepare(
        made, torch.optim.Adam(made.parameters(), lr=0.1), DataLoader(row_data(), 8)
    )
    own = {id(parameter) for parameter in model.parameters()}
    followed = {id(parameter) for parameter in optimizer.param_groups[0]["params"]} == own
    losses = _epoch(accelerator, model, optimizer, loader, distance)
    accelerator.save_model(model, folder)
    accelerator.save(model.state_dict(), Path(folder) / "whole.bin")
    accelerator.save(model.state_dict(), Path(folder) / "whole.safetensors", safe_serialization=True)
    read = _Tied()
    load_checkpoint_in_model(read, folder)
    whole = torch.load(Path(folder) / "whole.bin", weights_only=True)
    return {
        "tied": model.decoder.weight is model.encoder.weight,
        "same_object": model is made,
        "followed": followed,
        "losses": losses,
        "expected": expected,
        "weights": _numbers(read),
        "expected_weights": _numbers(plain),
        "devices": sorted({str(tensor.device) for tensor in whole.values()}),
        "whole": whole["decoder.weight"].flatten().tolist() == whole["encoder.weight"].flatten().tolist(),
    }


def _with_dropout(accelerator: Accelerator, seed: int) -> tuple[Any, ...]:
    set_seed(seed)
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    return accelerator.prepare(model, optimizer, scheduler, DataLoader(row_data(), 8, shuffle=True))  # type: ignore[no-any-return]


class _Average:
    """An object of the user's that keeps a tensor on the device."""

    def __init__(self, average: torch.Tensor) -> None:
        self.state = {"average": average}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def checkpoint(folder: str, async_save: bool) -> dict[str, Any]:
    """Save, go on, and go on from the checkpoint with new objects; then read it on the CPU."""

    def train(model: Any, optimizer: Any, scheduler: Any, loader: Any) -> list[float]:
        return _epoch(accelerator, model, optimizer, loader, distance, scheduler=scheduler)

    accelerator = Accelerator()
    parts = _with_dropout(accelerator, 7)
    train(*parts)
    custom = _Average(torch.cat([parameter.detach().flatten() for parameter in parts[0].parameters()]))
    accelerator.register_for_checkpointing(custom)
    accelerator.save_state(folder, async_save=async_save)
    saved = _numbers(parts[0])
    went_on = train(*parts)
    accelerator.end_training()
    runtime.reset()

    accelerator = Accelerator()
    parts = _with_dropout(accelerator, 8)
    train(*parts)
    accelerator.register_for_checkpointing(custom)
    accelerator.load_state(folder)
    loaded = _numbers(parts[0])
    resumed = train(*parts)
    state = torch.load(Path(folder) / "optimizer.bin", weights_only=True)["state"]
    runtime.reset()

    accelerator = Accelerator(cpu=True)
    parts = _with_dropout(accelerator, 8)
    accelerator.register_for_checkpointing(custom := _Average(torch.zeros(1)))
    accelerator.load_state(folder)
    return {
        "went_on": went_on,
        "resumed": resumed,
        "saved": saved,
        "loaded": loaded,
        "on_cpu": _numbers(parts[0]),
        "average": custom.state["average"].tolist() == saved,
        "devices": sorted({str(value.device) for entry in state.values() for value in entry.values()}),
        "momentum": len(parts[1].state_dict()["state"]),
    }


def programs_of_epochs() -> list[list[int]]:
    """Train three epochs and count, after each, what was compiled and run since before."""
    metrics = importlib.import_module("torch_xla.debug.metrics")
    device = importlib.import_module("torch_xla.core.xla_model")

    def counts() -> list[int]:
        device.wait_device_ops()  # programs run beside this thread, and count when they have ended
        run = sum((metrics.metric_data(name) or [0])[0] for name in ("ExecuteTime", "ExecuteReplicatedTime"))
        return [(metrics.metric_data("CompileTime") or [0])[0], run]

    accelerator = Accelerator(gradient_accumulation_steps=2)
    parts = _with_dropout(accelerator, 7)
    model, optimizer, scheduler, loader = parts
    found, before = [], counts()
    for _ in range(3):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(distance(model(inputs), targets))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        now = counts()
        found.append([after - earlier for after, earlier in zip(now, before, strict=True)])
        before = now
    return found


def random_numbers() -> dict[str, Any]:
    """Draw on the device after seeds."""

    def draw() -> list[float]:
        return torch.rand(3, device=accelerator.device).cpu().tolist()

    torch.manual_seed(5)
    accelerator = Accelerator()
    first = draw()
    runtime.reset()
    torch.manual_seed(5)
    accelerator = Accelerator()
    again = draw()
    set_seed(6)
    other = draw()
    set_seed(6)
    synchronize_rng_state("xla")
    return {"first": first, "again": again, "other": other, "other_again": draw()}


def workers() -> dict[str, Any]:
    """Read with processes; and from an iterable dataset."""
    accelerator = Accelerator()
    ends, read = [], []
    loader = accelerator.prepare(DataLoader(row_data(), 8, num_workers=2))
    for inputs, _ in loader:
        ends.append(accelerator.gradient_state.end_of_dataloader)
        read += inputs.cpu().tolist()
    runtime.reset()
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    dispatched = [
        row for inputs, _ in accelerator.prepare(DataLoader(row_data(), 8)) for row in inputs.cpu().tolist()
    ]
    rows = row_data().tensors[0].tolist()
    return {"ends": ends, "same": read == rows, "dispatched": dispatched == rows}


def one_by_one() -> dict[str, Any]:
    """Prepare model and optimizer in calls of their own, in both orders."""
    changed = []
    for first in ("model", "optimizer"):
        accelerator = Accelerator()
        model = small()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        before = _numbers(model)
        if first == "model":
            model = accelerator.prepare(model)
            optimizer = accelerator.prepare_optimizer(optimizer)
        else:
            optimizer = accelerator.prepare(optimizer)
            model = accelerator.prepare(model)
        _epoch(accelerator, model, optimizer, accelerator.prepare(DataLoader(row_data(), 8)), distance)
        changed.append(_numbers(model) != before)
        runtime.reset()
    return {"changed": changed}


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(13.0))
