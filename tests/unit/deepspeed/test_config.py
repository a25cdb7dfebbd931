"""DeepSpeed's configuration: what of it is null, "auto" or in no file."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from notebook_accel import DeepSpeedPlugin
from notebook_accel.deepspeed import fill, resolve
from notebook_accel.deepspeed.config import HfDeepSpeedConfig
from notebook_accel.handlers import GradientAccumulationPlugin
from notebook_accel.utils import DummyOptim


def facts(**values: Any) -> fill.Facts:
    known = {
        "mixed_precision": "no",
        "num_steps": 1,
        "world_size": 1,
        "batch_size": 8,
        "step_shares": 1,
        "on_cpu": True,
        "model": torch.nn.Linear(1, 1),
    }
    return fill.Facts(**{**known, **values})


def test_a_section_that_is_null_is_as_one_that_is_not_there() -> None:
    config = HfDeepSpeedConfig({"zero_optimization": {"offload_param": None}})
    config.set_value("zero_optimization.offload_param.device", "cpu")
    assert config.config == {"zero_optimization": {"offload_param": {"device": "cpu"}}}

    given = {"zero_optimization": {"stage": 3, "offload_param": None}, "fp16": None, "scheduler": None}
    plugin = DeepSpeedPlugin(given, offload_param_device="cpu")
    plugin.set_mixed_precision("bf16")
    assert plugin.deepspeed_config == {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
        "bf16": {"enabled": True},
    }
    assert given["fp16"] is None, "what was given stays"
    assert DeepSpeedPlugin({"zero_optimization": None}, zero_stage=2).zero_stage == 2
    halved = DeepSpeedPlugin({"zero_optimization": {"stage": 1}, "fp16": None})
    halved.set_mixed_precision("fp16")
    assert halved.get_value("fp16.enabled") is True


def test_options_of_an_optimizer_that_are_null_are_none() -> None:
    plugin = DeepSpeedPlugin(
        {"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": None}}
    )
    config = fill.fill_config(plugin, facts(optimizer=DummyOptim(torch.nn.Linear(1, 1).parameters())))
    assert config["optimizer"] == {"type": "AdamW", "params": {"torch_adam": True}}


def test_a_launch_takes_a_section_that_is_null() -> None:
    variables = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": '{"zero_optimization": {"stage": 1}, "fp16": null}',
    }
    assert resolve.check_variables(variables, "fp16", here=False) == []


def test_a_stage_that_is_auto_is_the_default() -> None:
    """As it is with Accelerate."""
    plugin = DeepSpeedPlugin({"zero_optimization": {"stage": "auto"}})
    assert plugin.zero_stage == plugin.get_value("zero_optimization.stage") == 2
    assert plugin.hf_ds_config.is_zero2()
    assert fill.fill_config(plugin, facts())["zero_optimization"]["stage"] == 2
    assert DeepSpeedPlugin({"zero_optimization": {"stage": "auto"}}, zero_stage=3).hf_ds_config.is_zero3()


@pytest.mark.parametrize("path", ["größe.json", "a.json", "ab"])
def test_a_file_that_is_missing_is_named(path: str) -> None:
    with pytest.raises(ValueError, match=f"DeepSpeed config '{path}' does not exist in "):
        DeepSpeedPlugin(path)


@pytest.mark.parametrize("names", [("one", "four"), ("four", "one")])
def test_plugins_that_accumulate_differently_are_refused_in_any_order(names: tuple[str, str]) -> None:
    plugins = {
        "one": DeepSpeedPlugin({"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 1}),
        "four": DeepSpeedPlugin({"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 4}),
    }
    ordered = {name: plugins[name] for name in names}
    with pytest.raises(ValueError) as raised:
        resolve.resolve_accumulation(ordered, GradientAccumulationPlugin())
    assert all(
        f"{value} of config {name!r}" in str(raised.value) for name, value in (("one", 1), ("four", 4))
    )
    assert "Accelerator was given" not in str(raised.value)


@pytest.mark.parametrize("names", [("auto", "four"), ("four", "auto")])
def test_a_plugin_that_says_nothing_accumulates_as_the_other(names: tuple[str, str]) -> None:
    plugins = {
        "auto": DeepSpeedPlugin({"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": "auto"}),
        "four": DeepSpeedPlugin({"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 4}),
    }
    ordered = {name: plugins[name] for name in names}
    assert resolve.resolve_accumulation(ordered, GradientAccumulationPlugin()).num_steps == 4
    with pytest.raises(ValueError, match="2 of the Accelerator != 4 of DeepSpeed's config 'four'"):
        resolve.resolve_accumulation(ordered, GradientAccumulationPlugin(num_steps=2))
