"""What the tests of checkpoints share: small things to train, and how to compare them."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset


class Tied(torch.nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4, bias=False)
        self.second = torch.nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x))
        return result


class Counter:
    """An object to register."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["value"] < 0:
            raise ValueError("a counter below zero")
        self.value = state["value"]


def make_parts(seed: int = 0, norm: type[torch.nn.Module] = torch.nn.BatchNorm1d) -> tuple[Any, Any, Any]:
    """Return a model, its optimizer and scheduler; a BatchNorm has statistics that differ between ranks."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), norm(8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def make_loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(16.0)), batch_size=2, shuffle=True)


def step(accelerator: Any, model: Any, optimizer: Any, scheduler: Any) -> float:
    """Train one step on random numbers and return the loss."""
    loss = model(torch.randn(6, 4)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return float(loss.detach())


def trained(accelerator: Any, steps: int = 2, seed: int = 0) -> tuple[Any, Any, Any]:
    """Prepare parts, train them for some steps, and return them."""
    parts = accelerator.prepare(*make_parts(seed))
    for _ in range(steps):
        step(accelerator, *parts)
    return parts  # type: ignore[no-any-return]


def values(model: Any, optimizer: Any, scheduler: Any) -> list[Any]:
    """Return all numbers of the objects, names left out."""
    result: list[Any] = [tensor.flatten().tolist() for tensor in model.state_dict().values()]
    for state in optimizer.state_dict()["state"].values():
        result += [tensor.flatten().tolist() for tensor in state.values()]
    return [*result, scheduler.state_dict()["last_epoch"], scheduler.get_last_lr()]


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """Let writes beyond this size fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
