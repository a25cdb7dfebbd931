"""What the cases train: models, data, and a loop that notes all that a user could see."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, IterableDataset, TensorDataset


def linear(seed: int = 0) -> nn.Module:
    """Return a small regression model, the same at every call."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    """Return an optimizer with a memory, so that a step too many shows."""
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def regression(samples: int = 12, batch_size: int = 2, **options: Any) -> DataLoader[Any]:
    """Return a loader of synthetic samples; the last feature is the sample's number."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 3, generator=generator)
    x[:, 2] = torch.arange(samples) / samples
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    return DataLoader(data, batch_size=batch_size, generator=torch.Generator().manual_seed(7), **options)


@functools.cache
def _digits(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images[:samples] / 16, dtype=torch.float32), torch.tensor(labels[:samples])


def digits(samples: int = 203, batch_size: int = 16, **options: Any) -> DataLoader[Any]:
    """Return a loader of the handwritten digits of scikit-learn."""
    generator = torch.Generator().manual_seed(3)
    return DataLoader(TensorDataset(*_digits(samples)), batch_size=batch_size, generator=generator, **options)


def classifier() -> nn.Module:
    """Return a small model for the digits."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Dropout(0.0), nn.Linear(32, 10))


class Stream(IterableDataset[Any]):
    """The synthetic samples without an index."""

    def __init__(self, samples: int) -> None:
        self.rows = list(regression(samples).dataset)  # type: ignore[call-overload]

    def __iter__(self) -> Any:
        return iter(self.rows)


def parameters(accelerator: Any, model: Any) -> list[Any]:
    """Return the values of the user's model, rounded to what float32 carries."""
    return [value.detach().clone() for value in accelerator.unwrap_model(model).state_dict().values()]


def train(
    accelerator: Any,
    model: Any,
    optimizer: Any,
    loader: Any,
    scheduler: Any = None,
    *,
    epochs: int = 2,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    metric: bool = False,
) -> dict[str, Any]:
    """Train with `accumulate` and return everything that was seen on the way."""
    seen: dict[str, list[Any]] = {name: [] for name in ("loss", "batch", "flags", "rate", "norm")}
    state = accelerator.gradient_state
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                out = model(x)
                loss = cross_entropy(out, y) if y.ndim == 1 else mse_loss(out, y)
                accelerator.backward(loss)
                if accelerator.sync_gradients and clip_norm is not None:
                    seen["norm"].append(accelerator.clip_grad_norm_(model.parameters(), clip_norm))
                if accelerator.sync_gradients and clip_value is not None:
                    seen["norm"].append(accelerator.clip_grad_value_(model.parameters(), clip_value))
                optimizer.step()
                if scheduler is not None:
                    plateau = "Plateau" in type(scheduler.scheduler).__name__
                    scheduler.step(*([1.0] if plateau else []))
                    seen["rate"].append(scheduler.get_last_lr())
                optimizer.zero_grad()
            seen["loss"].append(loss.item())
            seen["batch"].append((len(x), x[:, -1].tolist()))
            seen["flags"].append(
                (
                    accelerator.sync_gradients,
                    state.end_of_dataloader,
                    state.remainder if state.end_of_dataloader else None,
                    accelerator.step,
                    accelerator.optimizer_step_was_skipped,
                )
            )
    result: dict[str, Any] = {**seen, "length": _length(loader), "parameters": parameters(accelerator, model)}
    if metric:
        result["accuracy"] = accuracy(accelerator, model, accelerator.prepare(digits(57, 8)))
    return result


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def accuracy(accelerator: Any, model: Any, loader: Any) -> tuple[int, int]:
    """Return how many samples of the loader are right, and how many there are, over all processes."""
    model.eval()
    right = total = 0
    for x, y in loader:
        with torch.no_grad():
            guesses, wanted = accelerator.gather_for_metrics((model(x).argmax(1), y))
        right += int((guesses == wanted).sum())
        total += len(wanted)
    model.train()
    return right, total
