"""Every option class: what is set is checked as by the constructor, and the value that is there changes nothing."""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import notebook_accel
from notebook_accel import checked, probes
from notebook_accel.checked import Checked
from notebook_accel.handlers import GradientAccumulationPlugin

F = "FullyShardedDataParallelPlugin"
EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "KwargsHandler": [{}],
    "AutocastKwargs": [{}, {"cache_enabled": False}],
    "GradScalerKwargs": [{}, {"init_scale": 2.0}],
    "InitProcessGroupKwargs": [{}, {"backend": None}],
    "DistributedDataParallelKwargs": [
        {},
        {"comm_hook": "power_sgd", "comm_state_option": {"matrix_approximation_rank": 2}},
    ],
    "GradientAccumulationPlugin": [{}, {"num_steps": 3}],
    "ProfileKwargs": [{}, {"activities": ["cpu"], "schedule_option": {"wait": 1, "warmup": 1, "active": 1}}],
    "DataLoaderConfiguration": [{}, {"split_batches": True, "data_seed": 3}],
    "ProjectConfiguration": [{}, {"project_dir": "a"}, {"project_dir": "a", "logging_dir": "a"}],
    "TorchDynamoPlugin": [{}, {"backend": "inductor", "options": {"trace.enabled": True}}],
    "AORecipeKwargs": [{}, {"pad_inner_dim": False}],
    "TorchTensorParallelConfig": [{}, {"plan": {"a": "colwise"}}],
    "TorchTensorParallelPlugin": [{}, {"tp_size": 2}],
    "TorchContextParallelConfig": [{}, {"cp_comm_strategy": "alltoall"}],
    "ParallelismConfig": [{}, {"tp_size": 2}, {"cp_size": 2, "dp_shard_size": 3}],
    "BnbQuantizationConfig": [{"load_in_8bit": True}, {"load_in_4bit": True, "torch_dtype": "bf16"}],
    "DeepSpeedPlugin": [{}, {"zero_stage": 3, "gradient_clipping": 1.0}],
    F: [
        *({"sharding_strategy": one, "reshard_after_forward": two, "fsdp_version": version}
          for one, two, version in itertools.product(
              (None, 1, "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"),
              (None, True, False, "HYBRID_SHARD"), (1, 2))),
        {"backward_prefetch": "NO_PREFETCH"},
        {"auto_wrap_policy": "SIZE_BASED_WRAP", "activation_checkpointing": True, "cpu_offload": True},
        {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "SHARDED_STATE_DICT"},
        {"sync_module_states": False, "mixed_precision_policy": "bf16", "ignored_modules": "head"},
    ],
}  # fmt: skip
"""Arguments of each class; pairs that contradict each other are left out."""
VARIABLES = {
    "FSDP_SHARDING_STRATEGY": "NO_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "false",
    "FSDP_BACKWARD_PREFETCH": "BACKWARD_POST",
    "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP",
    "FSDP_IGNORED_MODULES": "tail",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_FORWARD_PREFETCH": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
    "ACCELERATE_DYNAMO_BACKEND": "eager",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "true",
    "ACCELERATE_DYNAMO_MODE": "max-autotune",
    "PARALLELISM_CONFIG_TP_SIZE": "4",
}
UNSHOWN = ("device_mesh", "hf_ds_config", "deepspeed_config")  # a class may hold it; these have no equality
EXCHANGED = ("load_in_8bit", "load_in_4bit", "config", "fsdp_version")
"""What excludes something that the constructor may have got, which gives way; or what was completed for, and stays."""
ALONE = {("ProjectConfiguration", "project_dir")}
"""What changes nothing else, as with Accelerate: logs stay where they were."""
SPELLINGS = ("sharding_strategy", "reshard_after_forward")
"""Both say what the strategy is: what was there stays where it does not contradict what is set."""
VALUES = (None, True, False, 0, -1, 2, "", "nonsense", "inductor", "SHARD_GRAD_OP", ["x"], {"x": 1}, 1.5)

pytestmark = pytest.mark.filterwarnings("ignore:.*is not looked at")


def list_kinds(kind: type[Checked] = Checked) -> Iterator[type[Checked]]:
    """Return the option classes of the package."""
    for derived in kind.__subclasses__():
        if derived.__module__.startswith("notebook_accel."):
            yield derived
        yield from list_kinds(derived)


@functools.cache
def import_kinds() -> None:
    """Import the modules that define option classes."""
    root = Path(notebook_accel.__file__).parent
    for file in root.rglob("*.py"):
        if "(Checked)" in (text := file.read_text()) or "(KwargsHandler)" in text:
            importlib.import_module(
                ".".join(["notebook_accel", *file.relative_to(root).with_suffix("").parts])
            )


def make_all(name: str) -> Iterator[Any]:
    """Return an instance for each of the arguments."""
    if name == "AORecipeKwargs" and not probes.is_available("torchao"):
        pytest.skip("needs torchao")
    import_kinds()
    kind = next(kind for kind in list_kinds() if kind.__name__ == name)
    for arguments in EXAMPLES[name]:
        try:
            made = kind(**arguments)
        except ValueError as error:
            assert "contradict each other" in str(error)
        else:
            yield made


def show(options: Any) -> dict[str, Any]:
    """Return all that an instance holds and says."""
    said = {name: getattr(options, name, None) for name in ("strategy", "prefetches_backward", "total_size")}
    return {
        name: value for name, value in (checked._list_values(options) | said).items() if name not in UNSHOWN
    }


def test_every_option_class_is_listed() -> None:
    import_kinds()
    assert {kind.__name__ for kind in list_kinds()} == EXAMPLES.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_value_that_is_there_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do variables that are set since, nor the same value in another spelling."""
    for options in list(make_all(name)):
        with monkeypatch.context() as changed:
            for variable, value in VARIABLES.items():
                changed.setenv(variable, value)
            before = show(options)
            for item in fields(options):
                setattr(options, item.name, getattr(options, item.name))
                assert show(options) == before, item.name
    monkeypatch.undo()


@pytest.mark.parametrize(
    "name", [name for name in EXAMPLES if name != "DeepSpeedPlugin"]
)  # it checks each by itself
def test_what_is_set_is_what_the_constructor_makes_of_it(name: str) -> None:
    for arguments, options in zip(EXAMPLES[name][:2], itertools.islice(make_all(name), 2), strict=False):
        for item, value in itertools.product(fields(options), VALUES):
            if not item.init or item.name in EXCHANGED or (name, item.name) in ALONE:
                continue
            made, refused = None, None
            try:
                made = type(options)(**arguments | {item.name: value})
            except Exception as error:
                refused = f"{type(error).__name__}: {error}"
            own = copy.copy(options)
            before = show(own)
            try:
                setattr(own, item.name, value)
            except Exception as error:
                assert f"{type(error).__name__}: {error}" == refused, (item.name, value)
                assert show(own) == before
            else:
                assert refused is None, (item.name, value, refused)
                expected = show(made) | {name: getattr(own, name) for name in SPELLINGS if name in show(own)}
                assert show(own) == expected, (item.name, value)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_flag_is_true_or_false(name: str) -> None:
    options = next(make_all(name))
    flags = [item.name for item in fields(options) if item.type in ("bool", "bool | None")]
    for flag in flags:
        before = show(options)
        for wrong in ("nonsense", 5, [True]):
            with pytest.raises((TypeError, ValueError), match=flag):
                setattr(options, flag, wrong)
        assert show(options) == before


@pytest.mark.parametrize(
    ("name", "field", "wrong"),
    [
        ("GradientAccumulationPlugin", "num_steps", -3),
        ("GradientAccumulationPlugin", "num_steps", "2"),
        ("GradientAccumulationPlugin", "num_steps", True),
        ("DataLoaderConfiguration", "data_seed", "x"),
        ("DataLoaderConfiguration", "data_seed", 1.5),
    ],
)
def test_a_number_is_checked(name: str, field: str, wrong: object) -> None:
    with pytest.raises((TypeError, ValueError), match=f"{field}={wrong!r}"):
        setattr(next(make_all(name)), field, wrong)


def test_a_derived_class_has_flags_of_its_own() -> None:
    @dataclass
    class Derived(GradientAccumulationPlugin):
        own: bool = "auto"  # type: ignore[assignment]
        late: bool = field(init=False)

        def __post_init__(self) -> None:
            super().__post_init__()
            self.late = self.own = True

    assert Derived().own and Derived(num_steps=np.int64(3)).num_steps == 3
    with pytest.raises(TypeError, match="sync_each_batch='x'"):
        Derived(sync_each_batch="x")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", EXAMPLES)
def test_copies_are_equal(name: str) -> None:
    for options in make_all(name):
        copies = [pickle.loads(pickle.dumps(options, protocol)) for protocol in range(6)]
        copies += [copy.copy(options), copy.deepcopy(options)]
        for other in copies:
            assert show(other) == show(options) and vars(other).keys() == vars(options).keys()
        copies = [replace(options)]
        for items in (fields(options), reversed(fields(options))):  # type: ignore[call-overload]
            copies.append(type(options).__new__(type(options)))
            for item in items:
                setattr(copies[-1], item.name, getattr(options, item.name))
        names = [item.name for item in fields(options) if item.name not in UNSHOWN]
        for other in copies:
            assert type(other) is type(options)
            assert [getattr(other, name) for name in names] == [getattr(options, name) for name in names]
