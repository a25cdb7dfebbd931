"""fp16 and its loss scaling, which torch has for CPUs too: skipped steps, unscaling, several optimizers."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch

from notebook_accel import runtime
from notebook_accel.accelerator import Accelerator
from notebook_accel.handlers import AutocastKwargs, GradScalerKwargs
from notebook_accel.loss_scaler import LossScaler
from notebook_accel.state import DistributedType
from notebook_accel.utils import get_grad_scaler, get_mixed_precision_context_manager, is_fp16_available
from tests.unit.multiprocess import run_ranks

SCALE = 1024.0


def make(models: int = 1, fused: bool = False) -> tuple[Any, list[Any], list[Any]]:
    """Return an accelerator in fp16, models with weights of one, and their optimizers."""
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp16",
        kwargs_handlers=[GradScalerKwargs(init_scale=SCALE, growth_interval=10)],
    )
    made = [torch.nn.Linear(2, 1, bias=False) for _ in range(models)]
    for model in made:
        torch.nn.init.ones_(model.weight)
    prepared = [accelerator.prepare(model) for model in made]
    optimizers = [accelerator.prepare(torch.optim.SGD(m.parameters(), lr=1.0, fused=fused)) for m in prepared]
    return accelerator, prepared, optimizers


def gradient(model: Any) -> list[float]:
    weight: torch.Tensor = next(model.parameters())
    assert weight.grad is not None
    return [float(value) for value in weight.grad.flatten()]


def test_a_step_in_fp16(clean_runtime: None) -> None:
    accelerator, (model,), (optimizer,) = make()
    assert is_fp16_available() and accelerator.native_amp and accelerator.scaler.is_enabled()
    x = torch.tensor([[1.0, 2.0]])
    with accelerator.autocast():
        assert torch.ones(2, 2).mm(torch.ones(2, 2)).dtype == torch.float16
    out = model(x)
    assert out.dtype == torch.float32
    accelerator.backward(out.sum())
    assert gradient(model) == [SCALE, 2 * SCALE]
    norm = accelerator.clip_grad_norm_(model.parameters(), 100.0)
    assert norm.item() == pytest.approx(5**0.5) and gradient(model) == [1, 2]
    accelerator.unscale_gradients(optimizer)
    assert gradient(model) == [1, 2], "what was unscaled is not unscaled again"
    optimizer.step()
    assert model.weight.tolist() == [[0, -1]] and not accelerator.optimizer_step_was_skipped


def test_a_model_is_copied_between_clipping_and_the_step(clean_runtime: None) -> None:
    accelerator, (model,), (optimizer,) = make()
    accelerator.backward(model(torch.ones(1, 2)).sum())
    accelerator.clip_grad_norm_(model.parameters(), 100.0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    optimizer.step()
    assert model(torch.ones(1, 2)).item() == 0 and [twin(torch.ones(1, 2)).item() for twin in copies] == [
        2,
        2,
    ]


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_skips_the_step_and_lowers_the_scale(clean_runtime: None, fused: bool) -> None:
    accelerator, (model,), (optimizer,) = make(fused=fused)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda count: 0.5**count)
    scheduler = accelerator.prepare(schedule)
    seen, lower = [], []
    for factor in (1.0, float("inf"), 1.0):
        before = accelerator.scaler.get_scale()
        accelerator.backward((model(torch.ones(1, 2)) * factor).sum())
        if factor == 1.0 and not fused:
            accelerator.clip_grad_value_(model.parameters(), 10.0)
        optimizer.step()
        lower.append(before > accelerator.scaler.get_scale())
        scheduler.step()
        optimizer.zero_grad()
        seen.append(
            (accelerator.optimizer_step_was_skipped, *scheduler.get_last_lr(), *model.weight[0].tolist())
        )
    assert seen == [(False, 0.5, 0, 0), (True, 0.5, 0, 0), (False, 0.25, -0.5, -0.5)]
    assert lower == [False, True, False]
    assert accelerator.scaler.state_dict()["scale"] == SCALE / 2


def test_two_optimizers_share_a_scale(clean_runtime: None) -> None:
    accelerator, models, optimizers = make(models=2)
    for round_ in range(2):
        for model in models:
            accelerator.backward(model(torch.tensor([[1.0, 2.0]])).sum() * (float("inf") if round_ else 1.0))
        accelerator.clip_grad_value_([p for m in models for p in m.parameters()], 100.0)
        for optimizer in optimizers:
            optimizer.step()
            assert accelerator.scaler.get_scale() == SCALE / (1 + round_)
            optimizer.zero_grad()
        for model in models:
            assert model.weight.tolist() == [[0, -1]], "both gradients are divided by the scale once"
        assert accelerator.optimizer_step_was_skipped is bool(round_)
    assert accelerator.scaler.state_dict()["scale"] == SCALE / 2, "one overflow, one change of the scale"


def test_an_overflow_of_one_leaves_the_others_gradients_right(clean_runtime: None) -> None:
    accelerator, models, optimizers = make(models=2)
    for model, factor in zip(models, (float("inf"), 1.0), strict=True):
        accelerator.backward(model(torch.tensor([[1.0, 2.0]])).sum() * factor)
    for optimizer in optimizers:
        optimizer.step()
    assert [optimizer.step_was_skipped for optimizer in optimizers] == [True, False]
    assert models[0].weight.tolist() == [[1, 1]] and models[1].weight.tolist() == [[0, -1]]


def test_a_look_at_the_scale_leaves_what_was_found_of_other_optimizers(clean_runtime: None) -> None:
    accelerator, models, optimizers = make(models=2)
    for model, factor in zip(models, (1.0, float("inf")), strict=True):
        accelerator.backward(model(torch.tensor([[1.0, 2.0]])).sum() * factor)
    accelerator.clip_grad_value_([p for m in models for p in m.parameters()], 100.0)
    optimizers[1].step()
    assert accelerator.scaler.get_scale() == SCALE / 2
    optimizers[0].step()
    assert [optimizer.step_was_skipped for optimizer in optimizers] == [False, True]


def test_one_loss_after_another(clean_runtime: None) -> None:
    accelerator, models, optimizers = make(models=2)
    for _ in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            accelerator.backward(model(torch.tensor([[1.0, 2.0]])).sum())
            accelerator.clip_grad_norm_(model.parameters(), 100.0)
            assert gradient(model) == [1, 2]
            optimizer.step()
            optimizer.zero_grad()
    assert all(model.weight.tolist() == [[-1, -3]] for model in models)


@pytest.mark.parametrize("clip", [False, True])
def test_one_model_accumulates_while_the_other_ones_step_changes_the_scale(
    clean_runtime: None, clip: bool
) -> None:
    accelerator, models, optimizers = make(models=2)
    accelerator.gradient_accumulation_steps = 2
    accelerator.scaler.set_growth_interval(1)
    for number, value in enumerate((1.0, 3.0, 5.0, 7.0)):
        for model, optimizer in zip(models, optimizers, strict=True):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.tensor([[value, 0.0]])).sum())
                if clip:
                    accelerator.clip_grad_norm_(model.parameters(), 100.0)
                optimizer.step()
                optimizer.zero_grad()
        assert [model.weight.tolist() for model in models] == [
            [[[1, 1], [-1, 1], [-1, 1], [-7, 1]][number]]
        ] * 2


def test_gradients_accumulate_scaled(clean_runtime: None) -> None:
    accelerator, (model,), (optimizer,) = make()
    accelerator.gradient_accumulation_steps = 2
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.tensor([[1.0, 2.0]])).sum())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 100.0)
                assert gradient(model) == [1, 2]
            optimizer.step()
            optimizer.zero_grad()
    assert model.weight.tolist() == [[-1, -3]]


def test_clipping_waits_until_gradients_are_complete(clean_runtime: None) -> None:
    accelerator, (model,), (optimizer,) = make()
    accelerator.gradient_accumulation_steps = 2
    norms = []
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.tensor([[3.0, 4.0]])).sum())
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 2.5)))
            accelerator.clip_grad_value_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert norms == pytest.approx([2.5, 5.0, 2.5, 5.0])
    assert model.weight.tolist() == [[-1, -1]], "two steps of 1 for each weight"


def test_gradients_are_not_added_to_unscaled_ones(clean_runtime: None) -> None:
    accelerator, (model,), (optimizer,) = make()
    x = torch.tensor([[1.0, 2.0]])
    accelerator.backward(model(x).sum())
    accelerator.clip_grad_norm_(model.parameters(), 100.0)
    accelerator.backward(model(x).sum())
    for step in (lambda: accelerator.clip_grad_norm_(model.parameters(), 100.0), optimizer.step):
        with pytest.raises(RuntimeError, match="unscale and clip once for each step"):
            step()
    optimizer.zero_grad()
    accelerator.backward(model(x).sum())
    accelerator.clip_grad_norm_(model.parameters(), 100.0)
    assert gradient(model) == [1, 2], "dropped gradients do not count"
    optimizer.step()
    assert model.weight.tolist() == [[0, -1]]


def test_an_optimizer_is_not_kept(clean_runtime: None) -> None:
    accelerator, (model,), (optimizer,) = make()
    accelerator.backward(model(torch.ones(1, 2)).sum())
    accelerator.clip_grad_norm_(model.parameters(), 100.0)
    optimizer.step()
    kept = weakref.ref(optimizer.optimizer)
    accelerator.free_memory()
    del model, optimizer
    gc.collect()
    assert kept() is None, "its state is as large as the model"


def test_a_loss_of_another_model_between_clipping_and_the_step(clean_runtime: None) -> None:
    accelerator, (first, second), (optimizer, other) = make(models=2)
    accelerator.backward(first(torch.ones(1, 2)).sum())
    accelerator.clip_grad_norm_(first.parameters(), 100.0)
    accelerator.backward(second(torch.ones(1, 2)).sum())
    accelerator.clip_grad_norm_(second.parameters(), 100.0)
    optimizer.step()
    other.step()
    assert first.weight.tolist() == second.weight.tolist() == [[0, 0]]


def test_the_scale_is_settled_where_it_is_saved() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = LossScaler("cpu", init_scale=4.0)
    for _ in range(2):
        scaler.scale(weight * float("inf")).backward()
        scaler.step(optimizer)
        scaler.request_update()
    assert scaler.get_scale() == 1.0 and scaler.found_inf(optimizer), "the loss before had a scale of 2"
    copied = copy.deepcopy(scaler)
    assert pickle.loads(pickle.dumps(scaler)).get_scale() == copied.get_scale() == 1.0
    fresh = LossScaler("cpu")
    fresh.load_state_dict(scaler.state_dict())
    assert fresh.get_scale() == 1.0
    scaler.step(optimizer)
    scaler.request_update()
    scaler.step(optimizer)
    scaler.request_update()
    assert scaler.state_dict()["scale"] == 0.25, "a second step without a loss is a step of its own"


def test_a_disabled_scaler(clean_runtime: None) -> None:
    accelerator = Accelerator(
        cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(enabled=False)]
    )
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    for _ in range(2):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        accelerator.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        optimizer.zero_grad()
    assert not accelerator.optimizer_step_was_skipped


def test_contexts_and_scalers_by_function(clean_runtime: None) -> None:
    assert get_grad_scaler(init_scale=8.0).get_scale() == 8.0
    Accelerator(cpu=True, mixed_precision="bf16")
    square = torch.ones(2, 2)
    with get_mixed_precision_context_manager(True):
        assert square.mm(square).dtype == torch.bfloat16
    with get_mixed_precision_context_manager(True, AutocastKwargs(enabled=False)):
        assert square.mm(square).dtype == torch.float32
    with get_mixed_precision_context_manager():
        assert square.mm(square).dtype == torch.float32
    assert runtime.current() is not None and get_grad_scaler().is_enabled()
    with pytest.raises(ValueError, match="WRONG"):
        get_grad_scaler("WRONG")  # type: ignore[arg-type]
    assert DistributedType.FSDP == "FSDP"


def ranks_fp16() -> tuple[list[bool], list[float]]:
    accelerator, (model,), (optimizer,) = make()
    skipped = []
    for number in range(3):
        overflows = number == 1 and accelerator.is_main_process
        loss = model(torch.ones(1, 2)).sum() * (float("inf") if overflows else 1.0)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
    names = list(vars(model))  # in this order they go
    assert names.index("reducer") < names.index("process_group"), (
        "such a process hangs now and then at its end"
    )
    accelerator.end_training()
    return skipped, next(accelerator.unwrap_model(model).parameters()).flatten().tolist()


def test_an_overflow_in_one_process_skips_the_step_in_all() -> None:
    assert run_ranks(ranks_fp16) == [([False, True, False], [-1.0, -1.0])] * 2
