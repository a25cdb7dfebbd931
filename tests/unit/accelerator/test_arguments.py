"""Wrong arguments of an Accelerator and its methods are named, all of them in one error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from notebook_accel import Accelerator, runtime
from notebook_accel.accelerator.arguments import CHECKS
from notebook_accel.handlers import GradScalerKwargs
from tests.unit.multiprocess import run_ranks

WRONG: dict[str, tuple[Any, ...]] = {
    "device_placement": ("x",),
    "split_batches": ("yes",),
    "gradient_accumulation_steps": (2.5, None, True, "2", 0),
    "cpu": ("no",),
    "dataloader_config": ({},),
    "fsdp_plugin": (True, {}),
    "torch_tp_plugin": (2,),
    "rng_types": ("generator", 3),
    "project_config": ("x",),
    "gradient_accumulation_plugin": (3,),
    "step_scheduler_with_optimizer": (3,),
    "kwargs_handlers": (GradScalerKwargs(),),
    "parallelism_config": ({},),
}


def test_each_wrong_argument_is_named(clean_runtime: None) -> None:
    assert WRONG.keys() == CHECKS.keys()
    for name, values in WRONG.items():
        for value in values:
            with pytest.raises(ValueError if value == 0 else TypeError, match=f"^{name}"):
                Accelerator(**({"cpu": True} | {name: value}))
    assert runtime.current() is None, "nothing has changed"


@pytest.mark.parametrize("value", [None, 0, 1, np.bool_(True), np.bool_(False)])
def test_values_that_are_as_good_as_true_and_false(value: Any, clean_runtime: None) -> None:
    for name in ("device_placement", "split_batches", "step_scheduler_with_optimizer"):
        found = getattr(Accelerator(**({"cpu": True} | {name: value})), name)
        assert found is bool(value), name
    assert Accelerator(cpu=value).device.type == "cpu"


def test_all_wrong_arguments_are_in_one_error(clean_runtime: None) -> None:
    with pytest.raises(TypeError) as caught:
        Accelerator(cpu="no", rng_types="generator", dataloader_config={})  # type: ignore[arg-type]
    assert [line.partition("=")[0].split()[0] for line in str(caught.value).splitlines()] == [
        "cpu",
        "dataloader_config",
        "rng_types",
    ]
    assert "perhaps ['generator']" in str(caught.value)


def test_models_in_place_of_parameters(clean_runtime: None) -> None:
    accelerator = Accelerator(cpu=True)
    model: Any = accelerator.prepare(torch.nn.Linear(1, 1))
    for clip in (accelerator.clip_grad_norm_, accelerator.clip_grad_value_):
        with pytest.raises(TypeError, match=r"parameters is a Linear: .* model\.parameters\(\)"):
            clip(model, 1.0)


def _join_unprepared() -> str:
    with (
        pytest.raises(TypeError) as caught,
        Accelerator(cpu=True).join_uneven_inputs([torch.nn.Linear(1, 1)]),
    ):
        pass
    return str(caught.value)


def test_joining_a_model_that_was_not_prepared() -> None:
    wanted = (
        "join_uneven_inputs takes models that prepare wrapped for several processes, which it does where something is "
        "trained, and Linear is none"
    )
    assert run_ranks(_join_unprepared) == [wanted] * 2
