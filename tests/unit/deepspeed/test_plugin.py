"""DeepSpeedPlugin, DeepSpeed's config, and what of them contradicts what; nothing here needs DeepSpeed."""

from __future__ import annotations

import base64
import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from notebook_accel import Accelerator, DeepSpeedPlugin, notebook_launcher
from notebook_accel.accelerator import strategy_table
from notebook_accel.deepspeed import cpu_order, fill, resolve
from notebook_accel.handlers import DistributedDataParallelKwargs, GradientAccumulationPlugin
from notebook_accel.strategies.base import Plugins
from notebook_accel.utils import DummyOptim, DummyScheduler, HfDeepSpeedConfig, patch_environment
from tests.structure.source import ROOT

ZERO3 = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "gradient_clipping": "auto"}
SAMPLES = ROOT / "tests" / "unit" / "configs"


def test_a_plugin_alone() -> None:
    plugin = DeepSpeedPlugin()
    assert plugin.deepspeed_config == {
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 2, "stage3_gather_16bit_weights_on_model_save": False},
    }
    assert (plugin.zero_stage, plugin.offload_param_device, plugin.zero3_init_flag) == (2, "none", False)
    assert DeepSpeedPlugin(zero_stage=3).zero3_init_flag
    assert not DeepSpeedPlugin(zero_stage=3, zero3_init_flag=False).is_zero3_init_enabled()
    nvme = DeepSpeedPlugin(zero_stage=3, offload_optimizer_device="nvme", offload_optimizer_nvme_path="/fast")
    assert nvme.get_value("zero_optimization.offload_optimizer") == {"device": "nvme", "nvme_path": "/fast"}


def test_a_plugin_and_deepspeeds_config(tmp_path: Path) -> None:
    path = tmp_path / "zero3.json"
    path.write_text(json.dumps(ZERO3))
    text = base64.urlsafe_b64encode(json.dumps(ZERO3).encode()).decode()
    for source in (ZERO3, path, str(path), json.dumps(ZERO3), text, HfDeepSpeedConfig(ZERO3)):
        plugin = DeepSpeedPlugin(hf_ds_config=source, gradient_clipping=0.5)
        assert (plugin.zero_stage, plugin.offload_param_device, plugin.gradient_clipping) == (3, "cpu", 0.5)
        assert plugin.get_value("gradient_clipping") == 0.5, '"auto" is filled'
    assert ZERO3["gradient_clipping"] == "auto", "what was given stays"


def test_the_environment_of_a_launch() -> None:
    variables: dict[str, Any] = {
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_GRADIENT_CLIPPING": "0.5",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
    }
    with patch_environment(**variables):
        plugin = DeepSpeedPlugin()
        assert (plugin.zero_stage, plugin.gradient_clipping, plugin.gradient_accumulation_steps) == (
            3,
            0.5,
            4,
        )
        assert plugin.offload_optimizer_device == "cpu" and plugin.zero3_save_16bit_model is True
        assert plugin.zero3_init_flag is False
        assert DeepSpeedPlugin(zero_stage=2, gradient_clipping=1.0).gradient_clipping == 1.0, (
            "arguments count more"
        )
    with (
        patch_environment(accelerate_deepspeed_zero_stage="two"),
        pytest.raises(
            ValueError, match="ACCELERATE_DEEPSPEED_ZERO_STAGE='two' is no legal value of zero_stage"
        ),
    ):
        DeepSpeedPlugin()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"zero_stage": 4}, ["zero_stage 4 is none of 0, 1, 2, 3"]),
        ({"gradient_clipping": -1}, ['gradient_clipping -1 is neither "auto" nor a number from 0']),
        (
            {"gradient_accumulation_steps": 0},
            ['gradient_accumulation_steps 0 is neither "auto" nor a whole number from 1'],
        ),
        (
            {"offload_param_device": "cpu", "offload_optimizer_device": "disk"},
            [
                "offload_param_device 'cpu' needs zero_stage 3, not 2",
                "offload_optimizer_device 'disk' is none of none, cpu, nvme",
            ],
        ),
        (
            {"zero_stage": 3, "offload_param_device": "nvme", "offload_optimizer_nvme_path": "/x"},
            [
                "offload_param_device 'nvme' needs offload_param_nvme_path, a folder",
                "offload_optimizer_nvme_path '/x' is for offload_optimizer_device 'nvme', not 'none'",
            ],
        ),
        ({"enable_msamp": True}, ["MS-AMP is not supported"]),
        (
            {"hf_ds_config": ZERO3, "zero_stage": 2, "offload_param_device": "none"},
            ["zero_stage=2 != 3, zero_optimization.stage of", "offload_param_device='none' != 'cpu'"],
        ),
        (
            {"hf_ds_config": {"bf16": {"enabled": True}}},
            ["has no zero_optimization.stage: choose 0, 1, 2 or 3"],
        ),
        (
            {
                "hf_ds_config": {
                    "zero_optimization": {"stage": 2, "offload_optimizer": "cpu"},
                    "bf16": True,
                    "optimizer": {"params": {}},
                    "gradient_cliping": 1.0,
                }
            },
            [
                "zero_optimization.offload_optimizer of DeepSpeed's config is 'cpu', not an object",
                "bf16 of DeepSpeed's config is True, not an object with keys of its own",
                "optimizer of DeepSpeed's config has no type",
                "DeepSpeed knows no key 'gradient_cliping': 'gradient_clipping' is meant",
            ],
        ),
        (
            {"zero3_init_flag": "no", "zero3_save_16bit_model": "x", "transformer_moe_cls_names": ["A"]},
            [
                "zero3_init_flag 'no' is neither True nor False",
                "zero3_save_16bit_model 'x' is neither True nor False",
                "transformer_moe_cls_names ['A'] is no text: separate names by commas",
            ],
        ),
        ({"hf_ds_config": "nowhere.json"}, ["'nowhere.json' does not exist in "]),
        ({"hf_ds_config": "{'a': 1}"}, ["given as text is no JSON: Expecting property name"]),
        ({"hf_ds_config": 3}, ["the path of a JSON file or a dict, not int 3"]),
    ],
)
def test_a_plugin_that_is_wrong_says_all_of_it(arguments: dict[str, Any], told: list[str]) -> None:
    with pytest.raises(ValueError) as raised:
        DeepSpeedPlugin(**arguments)
    assert all(text in str(raised.value) for text in told), raised.value


def test_precision_and_accumulation_come_from_either_side() -> None:
    own = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}, "gradient_accumulation_steps": 4}
    plugins = {"default": DeepSpeedPlugin(own)}
    assert resolve.resolve_precision(plugins, None) == "bf16"
    assert resolve.resolve_accumulation(plugins, GradientAccumulationPlugin()).num_steps == 4
    with pytest.raises(
        ValueError, match=r"mixed_precision='fp16' contradicts bf16\.enabled in DeepSpeed's config"
    ):
        resolve.resolve_precision(plugins, "fp16")
    with pytest.raises(
        ValueError, match="gradient_accumulation_steps 2 of the Accelerator != 4 of DeepSpeed's config"
    ):
        resolve.resolve_accumulation(plugins, GradientAccumulationPlugin(num_steps=2))
    autos = {"one": DeepSpeedPlugin({**own, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}})}
    with patch_environment(accelerate_mixed_precision="fp16"):
        assert resolve.resolve_precision(autos, None) == "fp16"
    assert autos["one"].get_value("bf16.enabled") is False and autos["one"].mixed_precision() == "fp16"
    with pytest.raises(ValueError, match="DeepSpeed with mixed_precision='fp8'"):
        resolve.resolve_precision(plugins, "fp8")


def test_an_accelerator_refuses_before_anything_starts(clean_runtime: None) -> None:
    plugin, other = DeepSpeedPlugin({**ZERO3, "gradient_accumulation_steps": 8}), DeepSpeedPlugin()
    with pytest.raises(ValueError, match="!= 8 of DeepSpeed's config 'first'"):
        Accelerator(cpu=True, deepspeed_plugin={"first": plugin}, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="are the same: leave one out"):
        Accelerator(cpu=True, deepspeed_plugin=plugin, deepspeed_plugins={"a": other})
    with pytest.raises(TypeError, match=r"a DeepSpeedPlugin or a dict of them, not default: 'zero\.json'"):
        Accelerator(cpu=True, deepspeed_plugin="zero.json")
    with pytest.raises(ValueError, match="by AcceleratorState"):
        plugin.select()
    assert not torch.distributed.is_initialized()
    model = torch.nn.Linear(2, 2)
    plain = Accelerator(cpu=True)
    with pytest.raises(ValueError, match="it stands for what DeepSpeed's config has"):
        plain.prepare(model, DummyOptim(model.parameters()))
    assert plain.deepspeed_plugin is None
    with pytest.raises(ValueError, match="DeepSpeed is not in use"):
        plain.state.get_deepspeed_plugin("first")
    with pytest.raises(ValueError, match="DeepSpeed is not in use"):
        plain.state.select_deepspeed_plugin()


def test_a_launch_refuses_before_anything_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("notebook_accel.probes.is_available", lambda name: True)
    variables = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "7"}
    with pytest.raises(ValueError, match="zero_stage 7 is none of 0, 1, 2, 3"):
        notebook_launcher(print, num_processes=2, environment=variables)
    path = tmp_path / "c.yaml"
    path.write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: lost.json\nuse_cpu: true\n"
    )
    with pytest.raises(ValueError, match=r"'lost\.json' does not exist"):
        notebook_launcher(print, num_processes=2, config=path)
    monkeypatch.setattr("notebook_accel.probes.is_available", lambda name: False)
    with pytest.raises(ValueError, match=r"DeepSpeed is not installed: .* 'notebook-accel\[deepspeed\]'"):
        notebook_launcher(print, num_processes=2, environment={"ACCELERATE_USE_DEEPSPEED": "true"})


def facts(**changes: Any) -> fill.Facts:
    values: dict[str, Any] = {
        "mixed_precision": "no",
        "num_steps": 2,
        "world_size": 4,
        "batch_size": 8,
        "step_shares": 4,
        "on_cpu": True,
        "model": torch.nn.Linear(2, 2),
    }
    return fill.Facts(**{**values, **changes})


@pytest.mark.parametrize("name", ["deepspeed_zero2", "deepspeed_zero3_offload"])
def test_the_samples_are_filled(name: str) -> None:
    plugin = DeepSpeedPlugin(SAMPLES / f"{name}.json")
    model = torch.nn.Linear(2, 2)
    model.config = torch.nn.Module()  # type: ignore[assignment]
    model.config.hidden_size = 16  # type: ignore[assignment]
    optimizer = DummyOptim(model.parameters(), lr=0.1)
    scheduler = DummyScheduler(optimizer, total_num_steps=100, warmup_num_steps=10)
    plugin.set_mixed_precision("fp16")
    config = fill.fill_config(
        plugin,
        facts(model=model, optimizer=optimizer, scheduler=scheduler, num_steps=1, mixed_precision="fp16"),
    )
    assert "auto" not in json.dumps(config)
    assert config["train_batch_size"] == 8 * 4 and config["optimizer"]["params"]["lr"] == 0.1
    assert config["zero_optimization"]["reduce_bucket_size"] == 256
    rates = config["scheduler"]["params"]
    assert (rates["total_num_steps"], rates["warmup_num_steps"], rates["warmup_max_lr"]) == (25, 3, 0.1)
    assert plugin.is_auto("train_batch_size"), "the plugin is as before"


def test_what_stays_auto_is_named() -> None:
    config = {
        "optimizer": {"type": "Adam", "params": {"lr": "auto", "betas": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
        "zero_optimization": {"stage": 1},
        "train_micro_batch_size_per_gpu": "auto",
    }
    model = torch.nn.Linear(2, 2)
    optimizer = DummyOptim(model.parameters())
    with pytest.raises(ValueError) as raised:
        fill.fill_config(
            DeepSpeedPlugin(config),
            facts(optimizer=optimizer, scheduler=DummyScheduler(optimizer), batch_size=None),
        )
    told = str(raised.value).splitlines()[1:]
    assert [line.partition(" is ")[0] for line in told] == [
        "- optimizer.params.betas",
        "- scheduler.params.total_num_steps",
        "- train_micro_batch_size_per_gpu",
    ]
    assert told[1].endswith(
        "nothing says what it is: give total_num_steps to DummyScheduler, or give it a value"
    )
    assert told[2].endswith("prepare a loader with a batch_size in the same call, or give it a value")
    assert told[0].endswith("nothing says what it is: give it a value")


def test_config_and_code_contradict_each_other() -> None:
    model = torch.nn.Linear(2, 2)
    own = {
        "optimizer": {"type": "AdamW", "params": {}},
        "scheduler": {"type": "WarmupLR", "params": {}},
        "zero_optimization": {"stage": 1},
        "train_batch_size": 30,
        "train_micro_batch_size_per_gpu": 2,
    }
    with pytest.raises(ValueError) as raised:
        fill.fill_config(DeepSpeedPlugin(own), facts(optimizer=torch.optim.SGD(model.parameters())))
    assert str(raised.value).splitlines()[1:] == [
        "- the config has an optimizer, AdamW, and SGD was prepared: "
        "prepare a DummyOptim, or remove it from the config",
        "- the config has a scheduler, WarmupLR, and no DummyScheduler was prepared: "
        "prepare one, or remove it from the config",
        "- train_batch_size 30 != train_micro_batch_size_per_gpu 2 x gradient_accumulation_steps 2 x processes 4",
    ]
    optimizer = DummyOptim(model.parameters())
    own["optimizer"] = {"type": "AdamW", "params": {"betas": ["auto", 0.9]}}
    with pytest.raises(ValueError, match=r'optimizer\.params\.betas is "auto" and nothing says'):
        fill.fill_config(DeepSpeedPlugin(own), facts(optimizer=optimizer))
    with pytest.raises(ValueError) as raised:
        fill.fill_config(DeepSpeedPlugin(), facts(optimizer=optimizer, scheduler=DummyScheduler(optimizer)))
    assert str(raised.value).splitlines()[1:] == [
        "- a DummyOptim was prepared, and the config has no optimizer: add one, or prepare one of torch",
        "- a DummyScheduler was prepared, and the config has no scheduler: add one, or give lr_scheduler_callable",
    ]


def test_fill_match_and_process_are_accelerates() -> None:
    plugin = DeepSpeedPlugin(
        {"zero_optimization": {"stage": 1}, "a": {"b": "auto", "c": 1}, "train_batch_size": 2}
    )
    plugin.fill_match("a.b", **{"a.b": 5})
    assert plugin.get_value("a.b") == 5 and plugin.get_value("a.x", 7) == 7
    with pytest.raises(ValueError, match=r"a\.c is 1 in DeepSpeed's config and 2 here"):
        plugin.deepspeed_config_process(**{"a.c": 2})
    plugin.deepspeed_config_process(must_match=False, **{"a.c": 2})
    plugin.deepspeed_config["a"]["b"] = "auto"
    with pytest.raises(ValueError, match=r'a\.b is "auto" and nothing says what it is'):
        plugin.deepspeed_config_process()


def test_parameters_are_those_of_accelerate() -> None:
    pytest.importorskip("accelerate")
    from dataclasses import fields

    from accelerate.utils import DeepSpeedPlugin as Reference

    assert [item.name for item in fields(DeepSpeedPlugin) if item.init] == [
        item.name for item in fields(Reference) if item.init
    ]


def test_nothing_imports_deepspeed_by_itself() -> None:
    code = (
        "import sys, notebook_accel, notebook_accel.utils.deepspeed; notebook_accel.DeepSpeedPlugin(zero_stage=3)\n"
        "assert not {'deepspeed', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


class Slow:
    """A collective that ends when it is waited for."""

    def __init__(self) -> None:
        self.ended = False

    def is_completed(self) -> bool:
        return self.ended

    def wait(self) -> None:
        self.ended = True


def test_who_waits_for_a_gather_waits_for_those_before() -> None:
    class Backend:
        def all_gather(self, asynchronous: bool) -> Slow | None:
            return Slow() if asynchronous else None

        all_gather_into_tensor = all_gather

    backend = Backend()
    cpu_order.order_gathers(backend)
    cpu_order.order_gathers(backend)  # a second time it stays as it is
    first, second, third = (
        gather(True) for gather in (backend.all_gather, backend.all_gather_into_tensor, backend.all_gather)
    )
    assert first is not None and second is not None and third is not None
    second.wait()
    assert first.ended and second.is_completed() and not third.is_completed()
    third.wait()
    assert third.ended
    assert backend.all_gather(False) is None


def test_a_config_object_is_the_plugins_own() -> None:
    class Filled(HfDeepSpeedConfig):
        """Transformers fills a config of its own class on the way."""

    config = Filled(ZERO3)
    plugin = DeepSpeedPlugin(hf_ds_config=config, gradient_clipping=0.5)
    assert plugin.hf_ds_config is config and plugin.deepspeed_config is config.config
    assert config.get_value("gradient_clipping") == 0.5


def test_options_of_ddp_have_no_effect() -> None:
    plugins = Plugins(deepspeed={"default": DeepSpeedPlugin()}, ddp=DistributedDataParallelKwargs())
    strategy_table._check_together(plugins)


WRONG_VALUES: dict[str, tuple[Any, ...]] = {
    "zero_stage": (4, "2", True, 1.5, "auto"),
    "gradient_accumulation_steps": (0, "two", 1.5, True),
    "gradient_clipping": (-1, "much", True),
    "offload_optimizer_device": ("disk", 1),
    "offload_param_device": ("gpu",),
    "offload_param_nvme_path": (3,),
    "zero3_save_16bit_model": ("yes",),
    "zero3_init_flag": ("no", 2),
    "is_train_batch_min": ("largest",),
    "transformer_moe_cls_names": (["A"],),
    "enable_msamp": (True,),
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, many in WRONG_VALUES.items() for v in many])
def test_what_the_constructor_refuses_is_refused_later(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        DeepSpeedPlugin(**{name: value})
    plugin = DeepSpeedPlugin()
    before = dict(vars(plugin))
    with pytest.raises(ValueError, match=f"^{name} "):
        setattr(plugin, name, value)
    assert vars(plugin) == before


def test_a_stage_of_another_type_of_number_is_taken() -> None:
    for stage in (3.0, torch.tensor(3).numpy()[()]):
        plugin = DeepSpeedPlugin(zero_stage=stage, zero3_init_flag=1)  # type: ignore[arg-type]
        plugin.zero_stage = stage
        assert plugin.zero_stage == 3 and plugin.zero3_init_flag is True


def test_what_libraries_set_one_after_the_other_is_taken() -> None:
    """Values that go together only when all are set, values of Accelerate's own, and attributes that are no fields."""
    plugin = DeepSpeedPlugin()
    config = HfDeepSpeedConfig(ZERO3)
    plugin.hf_ds_config = config
    plugin.deepspeed_config = config.config
    for name, value in {
        "offload_param_device": "cpu",
        "offload_optimizer_device": "nvme",
        "offload_optimizer_nvme_path": Path("fast"),
        "zero3_init_flag": True,
        "zero_stage": 3,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero3_save_16bit_model": "auto",
        "transformer_moe_cls_names": None,
        "anything": "else",
    }.items():
        setattr(plugin, name, value)
        assert getattr(plugin, name) is value
    assert plugin.get_value("zero_optimization.stage") == 3 and plugin.deepspeed_config is config.config
    for wrong in ("path.json", {"zero_optimization": {}}, 3):
        with pytest.raises(ValueError, match=r"hf_ds_config .* is no HfDeepSpeedConfig"):
            plugin.hf_ds_config = wrong
    for other in (pickle.loads(pickle.dumps(plugin)), copy.deepcopy(plugin), copy.copy(plugin)):
        assert other.deepspeed_config == plugin.deepspeed_config and other.zero_stage == 3
        with pytest.raises(ValueError, match="zero_stage 4"):
            other.zero_stage = 4


def test_a_plugin_of_a_derived_class_is_made_once() -> None:
    class Counted(DeepSpeedPlugin):
        made = 0

        def __post_init__(self) -> None:
            super().__post_init__()
            self.made += 1

    plugin = Counted(zero_stage=3)
    plugin.zero_stage = 2
    assert plugin.made == 1 and plugin.deepspeed_config["zero_optimization"]["stage"] == 3


@pytest.mark.parametrize("flag", [True, 1])
def test_models_are_created_whole_below_stage_3(flag: Any) -> None:
    with pytest.warns(
        UserWarning, match="zero3_init_flag is for zero_stage 3, not 2: models are created whole"
    ):
        plugin = DeepSpeedPlugin(zero_stage=2, zero3_init_flag=flag)
    assert plugin.zero3_init_flag is False and not plugin.is_zero3_init_enabled()
