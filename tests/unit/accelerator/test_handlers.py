"""Handlers and options that libraries read from an accelerator, and set."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from notebook_accel import Accelerator
from notebook_accel.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)
from notebook_accel.state import AcceleratorState, GradientState
from tests.unit.accelerator.test_train_lomo import Lomo
from tests.unit.multiprocess import run_ranks

HANDLERS = {
    "ddp_handler": DistributedDataParallelKwargs(static_graph=True),
    "scaler_handler": GradScalerKwargs(init_scale=4.0),
    "init_handler": InitProcessGroupKwargs(timeout=timedelta(seconds=50)),
    "autocast_handler": AutocastKwargs(cache_enabled=False),
    "profile_handler": ProfileKwargs(with_stack=True),
}
ABSENT = (
    "fp8_recipe_handler",
    "ao_recipe_handler",
    "te_recipe_handler",
    "msamp_recipe_handler",
    "flag_tensor",
)


@pytest.mark.usefixtures("clean_runtime")
def test_handlers_are_attributes() -> None:
    for name in (*HANDLERS, *ABSENT):
        assert getattr(Accelerator(cpu=True), name) is None, name
    accelerator = Accelerator(cpu=True, kwargs_handlers=list(HANDLERS.values()))
    for name, handler in HANDLERS.items():
        assert getattr(accelerator, name) is handler, name
    assert not (accelerator.fp8_enabled or accelerator.has_fp8_handler or accelerator.delayed_fp8_autocast)


@pytest.mark.usefixtures("clean_runtime")
def test_handlers_that_are_set_count() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    accelerator.autocast_handler = AutocastKwargs(enabled=False)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    with accelerator.autocast():
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32
    assert not accelerator.optimizer_step_was_skipped and model(torch.ones(1, 2)).dtype == torch.float32
    for name, wrong in (
        ("ddp_handler", AutocastKwargs()),
        ("autocast_handler", 5),
        ("ao_recipe_handler", {}),
    ):
        with pytest.raises(TypeError, match=f"{name} must be a"):
            setattr(accelerator, name, wrong)
    assert accelerator.autocast_handler == AutocastKwargs(enabled=False)
    accelerator.autocast_handler = None
    with accelerator.autocast():
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.bfloat16


@pytest.mark.usefixtures("clean_runtime")
def test_what_else_is_read() -> None:
    accelerator = Accelerator(cpu=True)
    assert not accelerator.has_lomo_optimizer
    accelerator.prepare_optimizer(Lomo(torch.nn.Linear(1, 1)))
    assert accelerator.has_lomo_optimizer
    loader = object()
    assert accelerator.deepspeed_ulysses_dl_adapter(loader, None) is loader
    accelerator.set_trigger()
    assert accelerator.flag_tensor is not None and accelerator.flag_tensor.item() == 1
    assert accelerator.check_trigger() and accelerator.flag_tensor.item() == 0
    state = AcceleratorState()
    assert (state.deepspeed_plugins, state.device_mesh, state.torch_tp_plugin) == (None, None, None)
    raw = torch.nn.Linear(2, 2)
    raw_optimizer = torch.optim.SGD(raw.parameters(), 0.1)
    optimizer, scheduler = accelerator.prepare(
        raw_optimizer, torch.optim.lr_scheduler.StepLR(raw_optimizer, 1)
    )
    assert (
        type(optimizer.accelerator_state) is AcceleratorState
        and optimizer.accelerator_state.device.type == "cpu"
    )
    for prepared in (optimizer, scheduler):
        assert type(prepared.gradient_state) is GradientState and prepared.gradient_state.sync_gradients


def ranks_ddp_handler() -> tuple[Any, ...]:
    accelerator = Accelerator(cpu=True)
    accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True, bucket_cap_mb=7)
    model: Any = accelerator.prepare(torch.nn.Linear(2, 2))
    assert isinstance(model, DistributedDataParallel)
    return model.find_unused_parameters, model.bucket_bytes_cap


def test_options_of_data_parallel_are_set_before_a_model_is_prepared() -> None:
    """As Trainer does with what its arguments say."""
    assert run_ranks(ranks_ddp_handler) == [(True, 7 * 1024 * 1024)] * 2
