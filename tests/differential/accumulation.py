"""Cases: gradient accumulation, synchronisation and clipping."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from tests.differential.parts import Stream, classifier, digits, linear, parameters, regression, sgd, train


def make(library: Any, steps: int = 1, plugin: dict[str, Any] | None = None, **config: Any) -> Any:
    """Return an accelerator of the library."""
    options: dict[str, Any] = {"gradient_accumulation_steps": steps}
    if plugin is not None:
        options = {
            "gradient_accumulation_plugin": library.utils.GradientAccumulationPlugin(
                num_steps=steps, **plugin
            )
        }
    loading = library.utils.DataLoaderConfiguration(**config)
    return library.Accelerator(cpu=True, dataloader_config=loading, **options)


def accumulated(
    library: Any,
    *,
    steps: int = 1,
    plugin: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    load: Callable[[], Any] = regression,
    **training: Any,
) -> Any:
    accelerator = make(library, steps, plugin, **(config or {}))
    model = linear()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer := sgd(model), 3, gamma=0.5)
    return train(accelerator, *accelerator.prepare(model, optimizer, load(), scheduler), **training)


def on_digits(library: Any, steps: int) -> Any:
    accelerator = make(library, steps)
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    prepared = accelerator.prepare(model, optimizer, digits(shuffle=True))
    return train(accelerator, *prepared, clip_norm=1.0, metric=True)


def two_models(library: Any) -> Any:
    accelerator = make(library, 2)
    models = [linear(0), linear(1)]
    optimizers = [sgd(model) for model in models]
    first, second, one, two, loader = accelerator.prepare(*models, *optimizers, regression(samples=10))
    seen = []
    for x, y in loader:
        with accelerator.accumulate(first, second):
            loss = mse_loss(first(x) + second(x), y)
            accelerator.backward(loss)
            for optimizer in (one, two):
                optimizer.step()
                optimizer.zero_grad()
        seen.append((loss.item(), accelerator.sync_gradients, accelerator.step))
    return seen, parameters(accelerator, first), parameters(accelerator, second)


def one_of_two_models(library: Any) -> Any:
    """`accumulate` is given one of the two models: the other's gradients are reduced with every batch."""
    accelerator = make(library, 2)
    models = [linear(0), linear(1)]
    first, second, optimizer, loader = accelerator.prepare(*models, sgd(models[0]), regression())
    seen = []
    for x, y in loader:
        with accelerator.accumulate(first):
            accelerator.backward(mse_loss(first(x) + second(x), y))
            seen.append([p.grad.clone() for p in (*first.parameters(), *second.parameters())])
            optimizer.step()
            optimizer.zero_grad()
    return seen


def steps_change_on_the_way(library: Any) -> Any:
    accelerator = make(library, 2)
    model = linear()
    model, optimizer, loader = accelerator.prepare(model, sgd(model), regression(samples=16))
    first = train(accelerator, model, optimizer, loader, epochs=1)
    accelerator.gradient_accumulation_steps = 3
    return first, accelerator.gradient_accumulation_steps, train(accelerator, model, optimizer, loader)


def evaluation_within_training(library: Any) -> Any:
    accelerator = make(library, 2)
    model = linear()
    model, optimizer, loader, other = accelerator.prepare(
        model, sgd(model), regression(samples=10), regression(samples=7)
    )
    seen = []
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        within = [
            (accelerator.gradient_state.end_of_dataloader, len(accelerator.gather_for_metrics(a)))
            for a, _ in other
        ]
        seen.append((accelerator.sync_gradients, accelerator.gradient_state.end_of_dataloader, within))
    return seen, parameters(accelerator, model)


def left_early(library: Any) -> Any:
    """A loop that is left and begun again counts on."""
    accelerator = make(library, 2)
    model = linear()
    model, optimizer, loader = accelerator.prepare(model, sgd(model), regression())
    seen = []
    for _ in range(2):
        for number, (x, y) in enumerate(loader):
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            seen.append((accelerator.sync_gradients, accelerator.step))
            if number == 1:
                break
    return seen, parameters(accelerator, model)


def gradients(model: Any) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def no_sync(library: Any) -> Any:
    accelerator = make(library)
    model, loader = accelerator.prepare(linear(), regression())
    (x, y), (x2, y2) = list(loader)[:2]
    with accelerator.no_sync(model):
        accelerator.backward(mse_loss(model(x), y))
    local = gradients(model)
    accelerator.backward(mse_loss(model(x2), y2))
    return local, gradients(model)


def trigger_sync_in_backward(library: Any) -> Any:
    accelerator = make(library)
    model, loader = accelerator.prepare(linear(), regression())
    (x, y), (x2, y2) = list(loader)[:2]
    with accelerator.no_sync(model):
        first = mse_loss(model(x), y)
        second = mse_loss(model(x2), y2)
        accelerator.backward(first)
        local = gradients(model)
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(second)
    reduced = gradients(model)
    accelerator.backward(mse_loss(model(x), y))
    return local, reduced, gradients(model)


def flags_alone(library: Any) -> Any:
    """`accumulate` without a loader."""
    accelerator = make(library, 3)
    model = accelerator.prepare(linear())
    seen = []
    for _ in range(7):
        with accelerator.accumulate(model):
            seen.append((accelerator.sync_gradients, accelerator.step))
    return seen


def clipped(library: Any, **arguments: Any) -> Any:
    accelerator = make(library)
    model = accelerator.prepare(linear())
    x = torch.full((2, 3), 2.0 + accelerator.process_index)
    accelerator.backward(model(x).square().sum() * 10)
    name = "clip_grad_value_" if "clip_value" in arguments else "clip_grad_norm_"
    result = getattr(accelerator, name)(model.parameters(), **arguments)
    return result, gradients(model)


def stream(samples: int = 11) -> Any:
    return DataLoader(Stream(samples), batch_size=2)


CASES: dict[str, Callable[[Any], Any]] = {
    "every batch": accumulated,
    "2 steps": partial(accumulated, steps=2),
    "3 steps, loader no multiple": partial(accumulated, steps=3, load=partial(regression, 10)),
    "more steps than batches": partial(accumulated, steps=20),
    "ragged last batch": partial(accumulated, steps=2, load=partial(regression, 13, 3)),
    "drop_last": partial(accumulated, steps=2, load=partial(regression, 13, 3, drop_last=True)),
    "shuffled": partial(accumulated, steps=2, load=partial(regression, 14, shuffle=True)),
    "without sync_with_dataloader": partial(
        accumulated, steps=3, plugin={"sync_with_dataloader": False}, load=partial(regression, 10), epochs=3
    ),
    "sync_each_batch": partial(accumulated, steps=3, plugin={"sync_each_batch": True}),
    "without adjust_scheduler": partial(accumulated, steps=2, plugin={"adjust_scheduler": False}),
    "split_batches": partial(
        accumulated, steps=2, config={"split_batches": True}, load=partial(regression, 14, 4)
    ),
    "dispatch_batches": partial(
        accumulated, steps=2, config={"dispatch_batches": True}, load=partial(regression, 11)
    ),
    "iterable": partial(accumulated, steps=2, load=stream),
    "iterable, sharded": partial(accumulated, steps=2, config={"dispatch_batches": False}, load=stream),
    "uneven": partial(accumulated, steps=2, config={"even_batches": False}, load=partial(regression, 11)),
    "seedable sampler": partial(
        accumulated, config={"use_seedable_sampler": True}, load=partial(regression, 14, shuffle=True)
    ),
    "clip_norm": partial(accumulated, steps=2, clip_norm=0.1),
    "clip_value": partial(accumulated, steps=2, clip_value=0.01),
    "digits": partial(on_digits, steps=1),
    "digits, 3 steps": partial(on_digits, steps=3),
    "two models": two_models,
    "one of two models": one_of_two_models,
    "steps change on the way": steps_change_on_the_way,
    "evaluation within training": evaluation_within_training,
    "left early": left_early,
    "no_sync": no_sync,
    "trigger_sync_in_backward": trigger_sync_in_backward,
    "flags alone": flags_alone,
    "norm 2": partial(clipped, max_norm=1.0),
    "norm inf": partial(clipped, max_norm=1.0, norm_type=float("inf")),
    "value": partial(clipped, clip_value=0.5),
}
