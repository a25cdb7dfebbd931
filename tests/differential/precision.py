"""Cases: mixed precision on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.differential.parts import classifier, digits, linear, regression, sgd, train


class Outputs(nn.Module):
    """A model that returns a structure and notes in which format it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.within: list[str] = []

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        out = self.layer(x)
        self.within.append(str(out.dtype))
        return {"out": out, "more": [out.sum(), (x, "text")], "half": x.half(), "count": x.long()}


def trained(library: Any, mode: str, steps: int = 1) -> Any:
    accelerator = library.Accelerator(cpu=True, mixed_precision=mode, gradient_accumulation_steps=steps)
    model = linear()
    prepared = accelerator.prepare(model, sgd(model), regression(10))
    return train(accelerator, *prepared, clip_norm=1.0), accelerator.mixed_precision, accelerator.native_amp


def on_digits(library: Any) -> Any:
    accelerator = library.Accelerator(cpu=True, mixed_precision="bf16")
    model = classifier()
    prepared = accelerator.prepare(model, sgd(model), digits(99, shuffle=True))
    return train(accelerator, *prepared, epochs=1, metric=True)


def outputs(library: Any, mode: str) -> Any:
    accelerator = library.Accelerator(cpu=True, mixed_precision=mode)
    torch.manual_seed(0)
    own = Outputs()
    model = accelerator.prepare(own)
    seen = model(torch.ones(2, 3))
    kept = accelerator.unwrap_model(model)(torch.ones(2, 3))
    bare = accelerator.unwrap_model(model, keep_fp32_wrapper=False)(torch.ones(2, 3))
    return seen, kept, bare, own.within


def autocast(library: Any, mode: str) -> Any:
    accelerator = library.Accelerator(cpu=True, mixed_precision=mode)
    square = torch.full((2, 2), 1 / 3)
    with accelerator.autocast():
        inside = square.mm(square)
    with accelerator.autocast(library.utils.AutocastKwargs(enabled=False)):
        disabled = square.mm(square)
    with library.utils.get_mixed_precision_context_manager(True):
        by_function = square.mm(square)
    return inside, disabled, by_function, square.mm(square)


def autocast_handler(library: Any) -> Any:
    handler = library.utils.AutocastKwargs(enabled=False)
    accelerator = library.Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[handler])
    model = accelerator.prepare(linear())
    with accelerator.autocast():
        product = torch.ones(2, 2).mm(torch.ones(2, 2))
    return model(torch.ones(2, 3)), product


def evaluation_mode(library: Any) -> Any:
    accelerator = library.Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare_model(linear(), evaluation_mode=True)
    return type(model).__name__, model(torch.ones(2, 3))


CASES: dict[str, Callable[[Any], Any]] = {
    "no": partial(trained, mode="no"),
    "bf16": partial(trained, mode="bf16"),
    "bf16, 3 steps": partial(trained, mode="bf16", steps=3),
    "bf16 on digits": on_digits,
    "outputs, no": partial(outputs, mode="no"),
    "outputs, bf16": partial(outputs, mode="bf16"),
    "autocast, no": partial(autocast, mode="no"),
    "autocast, bf16": partial(autocast, mode="bf16"),
    "autocast handler": autocast_handler,
    "evaluation mode": evaluation_mode,
}
