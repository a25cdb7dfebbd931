"""Mixed precision of prepared models."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch

from notebook_accel import precision
from notebook_accel.accelerator import Accelerator
from notebook_accel.handlers import AutocastKwargs, GradScalerKwargs
from notebook_accel.precision import MixedForward, Precision, PrecisionType
from notebook_accel.strategies.base import unwrap

CPU = torch.device("cpu")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        inner = self.layer(x) * scale
        return {"out": inner, "dtype": inner.dtype}


def test_no_leaves_the_model_alone(clean_runtime: None) -> None:
    model = Model()
    prepared = Accelerator(cpu=True).prepare(model)
    assert prepared is model and "forward" not in vars(model) and not model._forward_hooks


def test_bf16_computes_in_bf16_and_returns_float32(clean_runtime: None) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(Model())
    result = model(torch.ones(1, 3), scale=2.0)
    assert result["dtype"] == torch.bfloat16 and result["out"].dtype == torch.float32
    assert accelerator.native_amp and accelerator.scaler is None
    result["out"].sum().backward()
    assert model.layer.weight.grad.dtype == torch.float32
    assert list(inspect.signature(model.forward).parameters) == ["x", "scale"]
    with accelerator.autocast():
        assert torch.ones(2, 2).mm(torch.ones(2, 2)).dtype == torch.bfloat16
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert torch.ones(2, 2).mm(torch.ones(2, 2)).dtype == torch.float32


def test_unwrapping_gives_the_forward_back(clean_runtime: None) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(Model())
    assert accelerator.unwrap_model(model) is model and isinstance(model.forward, MixedForward)
    assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is model
    assert getattr(model.forward, "__func__", None) is Model.forward
    assert set(vars(model)) - set(vars(Model())) <= {
        "_is_accelerate_prepared",
        "_prepared_for_processes",
        "_prepared_by",
    }


def test_a_mixed_model_can_be_copied_and_pickled() -> None:
    model = Model()
    Precision("bf16", CPU).apply(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            other.layer.weight.zero_(), other.layer.bias.zero_()
        result = other(torch.ones(1, 3))
        assert result["out"].abs().sum() == 0 and result["dtype"] == torch.bfloat16
    assert model(torch.ones(1, 3))["out"].abs().sum() > 0


def test_a_forward_set_on_the_instance_survives() -> None:
    model = Model()
    own = vars(model)["forward"] = torch.sigmoid
    Precision("bf16", CPU).apply(model)
    assert unwrap(model, keep_fp32_wrapper=False).forward is own


@pytest.mark.parametrize(
    ("mode", "message"),
    [("fp12", "'fp12' is unknown, choose among no, bf16, fp16, fp8")],
)
def test_what_cannot_be_done_says_what_can(clean_runtime: None, mode: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Accelerator(cpu=True, mixed_precision=mode)


def test_the_environment_gives_the_default(clean_runtime: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert Accelerator(cpu=True).mixed_precision == "bf16"
    assert precision.resolve("no", CPU) == "no"
    assert precision.resolve(PrecisionType.BF16, CPU) == "bf16"


def test_fp16_makes_a_scaler() -> None:
    made = Precision("fp16", torch.device("cuda"), scaling=GradScalerKwargs(init_scale=8.0, enabled=False))
    assert made.scaler is not None and not made.scaler.is_enabled()
    assert Precision("bf16", torch.device("cuda")).scaler is None


def test_enumerations_compare_to_words() -> None:
    assert "bf16" in PrecisionType and "other" not in PrecisionType
    assert str(PrecisionType.BF16) == "bf16" and PrecisionType("bf16") is PrecisionType.BF16
    assert PrecisionType.list() == ["no", "fp8", "fp16", "bf16"]


def test_convert_outputs_to_fp32() -> None:
    wrapped = precision.convert_outputs_to_fp32(lambda: (torch.ones(1).half(), 3))
    assert wrapped()[0].dtype == torch.float32 and wrapped()[1] == 3
