"""What each rank of a run tries of an Accelerator: sharing out, training, collectives, accumulation of gradients."""

from __future__ import annotations

from typing import Any, Final

import torch

from ..accelerator import Accelerator
from ..data_loader import skip_first_batches
from .operations import broadcast, gather, gather_object, pad_across_processes, reduce
from .random import synchronize_rng_states
from .testing_models import RegressionDataset, RegressionModel

_BATCH: Final = 4
_ROUNDS: Final = 3  # batches of each rank
_STEPS: Final = 2  # batches whose gradients are added up


def try_script() -> None:
    """Share out data, skip batches, draw equal random numbers and train; every rank of a run calls it.

    Raises:
        AssertionError: something came out that should not; the message says what.
    """
    accelerator = Accelerator(mixed_precision="no")
    rows = torch.arange(_BATCH * accelerator.num_processes * _ROUNDS)
    loader: Any = accelerator.prepare(torch.utils.data.DataLoader(rows, batch_size=_BATCH))  # type: ignore[arg-type]
    found = accelerator.gather(torch.cat(list(loader))).sort().values.tolist()
    _expect("rows of all ranks", found, rows.tolist())
    _expect("batches after the first", len(list(skip_first_batches(loader, 1))), _ROUNDS - 1)

    torch.manual_seed(accelerator.process_index)
    synchronize_rng_states(["torch"])
    drawn = accelerator.gather(torch.rand(1).to(accelerator.device)).tolist()  # by the CPU's generator
    _expect("random numbers after synchronize_rng_states", len(set(drawn)), 1)

    data = RegressionDataset(length=len(rows), seed=0)
    alone, together = _train(data, _BATCH * accelerator.num_processes), _train(data, _BATCH, accelerator)
    difference = max(abs(one - other) for one, other in zip(alone, together, strict=True))
    if difference > 1e-4:
        raise AssertionError(f"weights of one and of all processes differ by {difference:.2g}")


def try_operations() -> None:
    """Try each collective; every rank of a run calls it.

    Raises:
        AssertionError: see `try_script`.
    """
    accelerator = Accelerator(mixed_precision="no")
    rank, size, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    own = torch.tensor([rank + 1.0], device=device)
    _expect("gather", gather(own).tolist(), [each + 1.0 for each in range(size)])
    _expect("gather_object", gather_object([rank]), list(range(size)))
    _expect("broadcast", broadcast(own.clone()).tolist(), [1.0])
    total = size * (size + 1) / 2
    _expect("reduce by sum", reduce(own.clone(), "sum").tolist(), [total])
    _expect("reduce by mean", reduce(own.clone(), "mean").tolist(), [total / size])
    padded = pad_across_processes(torch.ones(rank + 1, device=device))
    _expect("pad_across_processes", padded.tolist(), [1.0] * (rank + 1) + [0.0] * (size - rank - 1))


def try_gradient_sync() -> None:
    """Try `no_sync` and `accumulate`; every rank of a run calls it.

    Raises:
        AssertionError: see `try_script`.
    """
    accelerator = Accelerator(mixed_precision="no", gradient_accumulation_steps=_STEPS)
    plain = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    own = torch.full((1, 1), accelerator.process_index + 1.0, device=accelerator.device)
    mean = (accelerator.num_processes + 1) / 2

    def find_gradients() -> list[float]:
        gradient = plain.weight.grad
        return [0.0] if gradient is None else sorted(set(accelerator.gather(gradient.flatten()).tolist()))

    with accelerator.no_sync(model):
        model(own).sum().backward()
    _expect(
        "gradients under no_sync", find_gradients(), [each + 1.0 for each in range(accelerator.num_processes)]
    )
    optimizer.zero_grad()
    for step in range(_STEPS):
        with accelerator.accumulate(model):
            accelerator.backward(model(own).sum())
            is_last = step + 1 == _STEPS
            _expect("sync_gradients", accelerator.sync_gradients, is_last)
            if is_last:
                _expect("gradients that were accumulated", find_gradients(), [mean])
            optimizer.step()
            optimizer.zero_grad()


def _train(data: Any, batch_size: int, accelerator: Accelerator | None = None) -> list[float]:
    """Return the two numbers of a line after an epoch, by this process alone or by all of a run."""
    plain = RegressionModel()
    model: Any = plain
    optimizer: Any = torch.optim.SGD(plain.parameters(), lr=0.1)
    loader: Any = torch.utils.data.DataLoader(data, batch_size=batch_size)
    if accelerator is not None:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])
        if accelerator is None:
            loss.backward()
        else:
            accelerator.backward(loss)
        optimizer.step()
    return [plain.a.item(), plain.b.item()]


def _expect(what: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        raise AssertionError(f"{what}: {found}, expected {wanted}")
