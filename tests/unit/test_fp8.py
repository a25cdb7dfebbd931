"""fp8: what it needs, and linear layers that torchao converts."""

from __future__ import annotations

import copy
import sys
import types
import warnings
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch

from notebook_accel import FullyShardedDataParallelPlugin, ParallelismConfig, fp8, precision, probes
from notebook_accel.accelerator import Accelerator
from notebook_accel.fp8 import AORecipeKwargs, FP8BackendType
from notebook_accel.launch import preflight
from notebook_accel.launch.request import LaunchRequest
from notebook_accel.state import AcceleratorState
from tests.unit.multiprocess import run_ranks

CPU = torch.device("cpu")


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    sizes = [(3, 32), (32, 48), (48, 48), (48, 7), (7, 1)]
    return torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes))


def kinds(model: torch.nn.Module) -> list[str]:
    return [type(part).__name__ for part in model.children()]


def test_without_the_library_the_message_says_so(
    clean_runtime: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "is_available", lambda name: name != "torchao")
    for ask in (lambda: Accelerator(cpu=True, mixed_precision="fp8"), AORecipeKwargs):
        with pytest.raises(ImportError, match="pip install torchao"):
            ask()
    with pytest.raises(ValueError, match="mixed_precision='fp8': torchao"):
        preflight.check(
            LaunchRequest(function=len, args=([],), options={"num_processes": 1, "mixed_precision": "fp8"}),
            "notebook_launcher",
        )


def test_a_torchao_of_another_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    for name in [name for name in sys.modules if name.split(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(
        sys.modules, "torchao", types.ModuleType("torchao")
    )  # no package: nothing is inside it
    with pytest.raises(ImportError, match=r"torchao .* does not fit torch"):
        fp8.require_torchao()


def test_without_the_hardware_the_message_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    monkeypatch.setattr(probes, "is_available", lambda _: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    with pytest.raises(ValueError, match=r"capability 8\.9 or later, and A100 has 8\.0: use 'bf16'"):
        precision.resolve("fp8", torch.device("cuda", 0))
    with pytest.raises(ValueError, match="other devices than CUDA GPUs and CPUs"):
        precision.resolve("fp8", torch.device("mps"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert precision.resolve("fp8", torch.device("cuda", 0)) == precision.resolve("fp8", CPU) == "fp8"
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")
    with pytest.raises(ValueError, match="ACCELERATE_FP8_BACKEND='TE': only 'AO'"):
        fp8.check(CPU)


def test_inner_layers_are_converted_and_train(clean_runtime: None) -> None:
    pytest.importorskip("torchao")
    accelerator = Accelerator(cpu=True, mixed_precision="fp8")
    assert accelerator.fp8_backend is FP8BackendType.AO and accelerator.scaler is None
    plain = make_model()
    before = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(plain, optimizer)
    assert kinds(model) == ["Linear", "Float8Linear", "Float8Linear", "Linear", "Linear"]
    assert kinds(accelerator.prepare(model)) == kinds(model)
    x = torch.randn(16, 3)
    out = model(x)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, before(x), rtol=0.1, atol=0.1)
    accelerator.backward(out.square().mean())
    optimizer.step()
    assert not torch.equal(plain[1].weight, before[1].weight), (
        "the optimizer has the converted layer's weight"
    )
    assert list(accelerator.get_state_dict(model)) == list(before.state_dict())


def test_a_recipe_says_what_is_converted(clean_runtime: None) -> None:
    pytest.importorskip("torchao")

    def only_second(module: torch.nn.Module, name: str) -> bool:
        return name == "2"

    recipe = AORecipeKwargs(module_filter_func=only_second, pad_inner_dim=False)
    assert recipe.config.pad_inner_dim is False and recipe.config.enable_fsdp_float8_all_gather is False
    with pytest.raises(ValueError, match=r"AORecipeKwargs with another mixed_precision than 'fp8' \('no'\)"):
        Accelerator(cpu=True, mixed_precision="no", kwargs_handlers=[recipe])


class Planned(torch.nn.Sequential):
    """Layers of which torchao converts none by default."""

    tp_plan: ClassVar[dict[str, str]] = {"0": "colwise", "1": "rowwise"}

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(16, 24), torch.nn.Linear(24, 16))


def _prepare_without_layers() -> list[Any]:
    found = []
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    for options in ({}, {"fsdp_plugin": plugin}, {"parallelism_config": ParallelismConfig(tp_size=2)}):
        AcceleratorState._reset_state()
        accelerator = Accelerator(cpu=True, mixed_precision="fp8", **options)  # type: ignore[arg-type]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = accelerator.prepare(Planned())
        texts = [str(one.message) for one in caught if "fp8" in str(one.message)]
        found.append(
            (len(texts), "no layer to convert in Planned" in texts[0], model(torch.ones(2, 16)).dtype)
        )
    return found


def test_a_model_without_layers_to_convert_runs_in_bfloat16_however_it_is_spread() -> None:
    pytest.importorskip("torchao")
    for rank in run_ranks(_prepare_without_layers):
        assert rank == [(1, True, torch.float32)] * 3


def _count_scales() -> list[int]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    recipe = AORecipeKwargs(enable_fsdp_float8_all_gather=True)
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", fsdp_plugin=plugin, kwargs_handlers=[recipe])
    model, found = accelerator.prepare(make_model()), []
    other = copy.copy(accelerator)
    other.ao_recipe_handler = None
    other.prepare(make_model())
    for one in (other, accelerator):
        optimizer = one.prepare_optimizer(torch.optim.SGD(model.parameters(), 0.1))
        with mock.patch.object(fp8, "precompute_scales") as scales:
            optimizer.step()
        found.append(scales.call_count)
    return found


def test_scales_are_computed_whatever_a_copy_is_told_later() -> None:
    pytest.importorskip("torchao")
    assert run_ranks(_count_scales) == [[1, 1]] * 2


def test_recipe_of_the_accelerator(clean_runtime: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    monkeypatch.setenv("ACCELERATE_FP8_PAD_INNER_DIM", "0")
    recipe = AORecipeKwargs(module_filter_func=lambda module, name: name == "2")
    assert recipe.config.pad_inner_dim is False
    config: Any = recipe.config
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe])
    assert kinds(accelerator.prepare(make_model()))[1:3] == ["Linear", "Float8Linear"]
    with pytest.warns(UserWarning, match="no layer to convert in Sequential"):
        accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(3, 3)))
    everything = AORecipeKwargs(config=config, module_filter_func=lambda *_: True)
    with pytest.raises(ValueError, match="single linear layer"):
        fp8.convert(torch.nn.Linear(16, 16), everything)


def test_other_precisions_name_no_backend(clean_runtime: None) -> None:
    assert Accelerator(cpu=True).fp8_backend is FP8BackendType.NO
