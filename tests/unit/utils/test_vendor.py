"""Names for libraries that are not driven, and the small functions beside them."""

from __future__ import annotations

import json
import os
import types
from typing import Any

import accelerate.utils as theirs
import pytest
import torch
from torch import nn

from notebook_accel import utils
from notebook_accel.utils import vendor

CLASSES = [name for name, value in vars(vendor).items() if isinstance(value, vendor._Refused)]
FUNCTIONS = (
    "avg_losses_across_data_parallel_group",
    "convert_model",
    "apply_fp8_autowrap",
    "contextual_fp8_autocast",
)


@pytest.mark.parametrize("name", CLASSES)
def test_classes_exist_and_raise_on_use(name: str) -> None:
    found: Any = getattr(utils, name)
    assert isinstance(found, type) and hasattr(theirs, name) and not isinstance(1, found)
    for use in (lambda: found(tp_degree=2), lambda: type("Mine", (found,), {})):
        with pytest.raises(NotImplementedError, match=f"^{name}: .* not supported"):
            use()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_exist_and_raise_on_use(name: str) -> None:
    assert hasattr(theirs, name)
    with pytest.raises(NotImplementedError, match=f"^{name}: .* not supported"):
        getattr(utils, name)(1, key=2)


def test_nothing_is_installed() -> None:
    release = ".".join(torch.__version__.split(".")[:2])
    with pytest.raises(NotImplementedError, match=rf"pip install 'torch_xla\[tpu\]~={release}\.0'"):
        utils.install_xla()
    with pytest.raises(NotImplementedError, match=r"pip install -U 'torch torch_xla\[tpu\]'|-U"):
        utils.install_xla(upgrade=True)


def test_enumerations_are_accelerates() -> None:
    for name in ("ComputeEnvironment", "SageMakerDistributedType"):
        ours, other = getattr(utils, name), getattr(theirs, name)
        assert {item.name: item.value for item in ours} == {item.name: item.value for item in other}
        assert json.dumps(list(ours)) == json.dumps(list(other))
        assert [str(item) for item in ours] == [item.value for item in other]


def test_modules_bottom_up_are_accelerates() -> None:
    shared = nn.Linear(1, 1)
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU(), shared), nn.Sequential(shared))
    assert utils.get_module_children_bottom_up(model) == theirs.get_module_children_bottom_up(model)
    ours = utils.get_module_children_bottom_up(model, return_fqns=True)
    assert ours == theirs.get_module_children_bottom_up(model, return_fqns=True)
    assert ours[-1] == ("", model)


def test_layers_of_transformer_engine() -> None:
    kind = types.new_class(
        "Linear", (nn.Linear,), exec_body=lambda space: space.update(__module__="transformer_engine.pytorch")
    )
    mine = types.new_class("Mine", (kind,))
    assert not utils.has_transformer_engine_layers(nn.Sequential(nn.Linear(1, 1)))
    assert utils.has_transformer_engine_layers(nn.Sequential(kind(1, 1)))
    assert utils.has_transformer_engine_layers(mine(1, 1))


@pytest.mark.parametrize("purge", [utils.purge_accelerate_environment, theirs.purge_accelerate_environment])
def test_the_environment_is_as_before(purge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("OTHER", "1")
    seen = []

    def change(self: Any = None) -> str:
        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
        os.environ["ACCELERATE_NEW"] = "1"
        os.environ["OTHER"] = "2"
        return "done"

    def fail() -> None:
        del os.environ["ACCELERATE_MIXED_PRECISION"]
        raise KeyError

    base = purge(type("Base", (), {"test_it": change, "helper": change}))
    child = type("Child", (base,), {"test_more": change})
    for function in (purge(change), base().test_it, child().test_it, child().test_more):
        assert function() == "done"
        seen.append(
            (os.environ["ACCELERATE_MIXED_PRECISION"], "ACCELERATE_NEW" in os.environ, os.environ["OTHER"])
        )
    assert seen == [("no", False, "2")] * 4
    if purge is utils.purge_accelerate_environment:  # what was deleted comes back too
        with pytest.raises(KeyError):
            purge(fail)()
        assert os.environ["ACCELERATE_MIXED_PRECISION"] == "no"
    base().helper()
    assert os.environ.pop("ACCELERATE_NEW") == "1"
