"""What is set in the option classes is checked as by their constructors, and counts."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest
import torch

from notebook_accel import FullyShardedDataParallelPlugin, ParallelismConfig
from notebook_accel.checked import Checked
from notebook_accel.compilation import DynamoBackend, TorchDynamoPlugin
from notebook_accel.fp8 import AORecipeKwargs
from notebook_accel.handlers import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    ProfileKwargs,
    ProjectConfiguration,
)
from notebook_accel.parallelism import (
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)
from notebook_accel.quantization import BnbQuantizationConfig

Make = Callable[..., Any]
WRONG: list[tuple[Make, dict[str, Any]]] = [
    (
        DistributedDataParallelKwargs,
        {"comm_hook": "zip", "comm_wrapper": "power_sgd", "comm_state_option": [1]},
    ),
    (DistributedDataParallelKwargs, {"comm_state_option": {"rank": 3}}),
    (ProfileKwargs, {"activities": ["gpu"], "schedule_option": {"wait": 1}}),
    (TorchTensorParallelPlugin, {"tp_size": 0}),
    (TorchTensorParallelPlugin, {"tp_size": "2"}),
    (TorchTensorParallelConfig, {"enable_async_tp": True, "plan": [1]}),
    (TorchContextParallelConfig, {"cp_comm_strategy": "ring"}),
    (
        ParallelismConfig,
        {"tp_size": 0, "cp_size": True, "dp_shard_size": 1.5, "cp_backend": "x", "sp_backend": 1},
    ),
    (
        ParallelismConfig,
        {"tp_handler": 5, "cp_handler": TorchContextParallelConfig(), "dp_replicate_size": "2"},
    ),
    (ProjectConfiguration, {"total_limit": 0, "iteration": -1}),
    (TorchDynamoPlugin, {"backend": "warp"}),
    (
        FullyShardedDataParallelPlugin,
        {
            "fsdp_version": 3,
            "sharding_strategy": "SOME",
            "backward_prefetch": "BACK",
            "mixed_precision_policy": "int3",
            "auto_wrap_policy": int,
            "cpu_offload": "yes",
            "ignored_modules": torch.nn.Linear(1, 1),
            "state_dict_type": "LOCAL_STATE_DICT",
            "param_init_fn": 4,
            "limit_all_gathers": "maybe",
            "activation_checkpointing_offload": True,
            "activation_checkpointing": True,
            "transformer_cls_names_to_wrap": 5,
            "min_num_params": -1,
        },
    ),
    (
        lambda **given: BnbQuantizationConfig(**{"load_in_8bit": True, **given}),
        {
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf3",
            "bnb_4bit_compute_dtype": "x",
            "torch_dtype": "y",
        },
    ),
]
CASES = [(make, name, value) for make, fields in WRONG for name, value in fields.items()]


@pytest.mark.parametrize(
    ("make", "name", "value"), CASES, ids=lambda item: item if isinstance(item, str) else ""
)
def test_what_the_constructor_refuses_is_refused(make: Make, name: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError, NotImplementedError)) as refused:
        make(**{name: value})
    options = make()
    before = dict(vars(options))
    with pytest.raises(refused.type) as later:
        setattr(options, name, value)
    assert str(later.value) == str(refused.value)
    assert vars(options) == before


RIGHT: list[tuple[Make, str, Any]] = [
    (DistributedDataParallelKwargs, "comm_hook", "fp16"),
    (ProfileKwargs, "activities", ["cpu"]),
    (TorchTensorParallelPlugin, "tp_size", 2),
    (TorchContextParallelConfig, "cp_comm_strategy", "alltoall"),
    (ParallelismConfig, "tp_size", 2),
    (ParallelismConfig, "dp_replicate_size", 4),
    (ProjectConfiguration, "iteration", 4),
    (ProjectConfiguration, "project_dir", "here"),
    (TorchDynamoPlugin, "backend", "inductor"),
    (FullyShardedDataParallelPlugin, "sharding_strategy", "SHARD_GRAD_OP"),
    (FullyShardedDataParallelPlugin, "state_dict_type", "SHARDED_STATE_DICT"),
    (FullyShardedDataParallelPlugin, "backward_prefetch", "NO_PREFETCH"),
    (FullyShardedDataParallelPlugin, "auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
    (FullyShardedDataParallelPlugin, "cpu_offload", True),
    (lambda **given: FullyShardedDataParallelPlugin(fsdp_version=2, **given), "reshard_after_forward", False),
    (FullyShardedDataParallelPlugin, "mixed_precision_policy", "bf16"),
    (FullyShardedDataParallelPlugin, "limit_all_gathers", "false"),
    (lambda **given: BnbQuantizationConfig(**{"load_in_8bit": True, **given}), "torch_dtype", "bf16"),
]


@pytest.mark.parametrize(
    ("make", "name", "value"), RIGHT, ids=lambda item: item if isinstance(item, str) else ""
)
def test_what_is_set_is_completed_as_by_the_constructor(make: Make, name: str, value: Any) -> None:
    options, expected = make(), make(**{name: value})
    setattr(options, name, value)
    assert options == expected and vars(options).keys() - {"device_mesh"} == vars(expected).keys()
    for other in (
        copy.copy(options),
        copy.deepcopy(options),
        pickle.loads(pickle.dumps(options)),
        replace(options),
    ):
        assert type(other) is type(options) and getattr(other, name) == getattr(options, name)


def test_what_followed_from_a_value_follows_from_the_new_one() -> None:
    config = ParallelismConfig(tp_size=2)
    config.tp_size = 1
    assert config.tp_handler is None and config.total_size == 1
    config.cp_size = 2
    assert isinstance(config.cp_handler, TorchContextParallelConfig)
    plugin = FullyShardedDataParallelPlugin(
        state_dict_type="FULL_STATE_DICT", backward_prefetch="NO_PREFETCH"
    )
    plugin.state_dict_type = "SHARDED_STATE_DICT"
    assert plugin.saves_shards and type(plugin.state_dict_config).__name__ == "ShardedStateDictConfig"
    plugin.sharding_strategy = "HYBRID_SHARD"
    assert plugin.strategy == "HYBRID_SHARD" and not plugin.prefetches_backward
    dynamo = TorchDynamoPlugin()
    dynamo.backend = "eager"  # type: ignore[assignment]
    assert dynamo.backend is DynamoBackend.EAGER and dynamo.is_active
    project = ProjectConfiguration(project_dir="here")
    project.logging_dir = None
    assert project.logging_dir == "here"


def test_choices_of_the_user_outlive_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="NO_WRAP", backward_prefetch="NO_PREFETCH")
    monkeypatch.setenv("FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP")
    monkeypatch.setenv("FSDP_BACKWARD_PREFETCH", "BACKWARD_PRE")
    plugin.limit_all_gathers = False
    assert plugin.auto_wrap_policy is None and not plugin.prefetches_backward


@dataclass
class Outer(Checked):
    """Options with a check."""

    size: int = 1
    half: float | None = None

    def _complete_fields(self) -> None:
        if self.size < 1:
            raise ValueError(f"size {self.size} < 1")
        self.half = self.size / 2


@dataclass
class Inner(Outer):
    name: str = ""


def test_classes_that_derive() -> None:
    options = Inner(size=4, name="a")
    options.size = 6
    options.anything = 3  # type: ignore[attr-defined]
    assert (options.half, options.name) == (3, "a")
    with pytest.raises(ValueError, match="size 0 < 1"):
        options.size = 0
    assert options == Inner(size=6, name="a")


def test_the_number_of_bits_can_be_changed() -> None:
    config = BnbQuantizationConfig(load_in_8bit=True)
    config.load_in_4bit = True
    assert not config.load_in_8bit
    config.load_in_8bit = True
    assert not config.load_in_4bit


def move_projects(kind: Any) -> list[Any]:
    """Return the folders for logs of projects whose own folder changes."""
    given, named, empty = kind("a"), kind("a", logging_dir="logs"), kind()
    moved = kind("a")
    moved.project_dir = "b"
    for project in (given, named, empty):
        project.set_directories("b")
    seen = [moved.logging_dir, given.logging_dir, named.logging_dir, empty.logging_dir]
    given.project_dir = empty.project_dir = "c"
    return [*seen, given.logging_dir, empty.logging_dir, given.project_dir]


def test_the_folder_for_logs_stays_where_it_is_as_with_accelerate() -> None:
    theirs = pytest.importorskip("accelerate.utils").ProjectConfiguration
    assert move_projects(ProjectConfiguration) == move_projects(theirs)


def test_a_recipe_keeps_its_config() -> None:
    pytest.importorskip("torchao")
    own = importlib.import_module("torchao.float8").Float8LinearConfig(pad_inner_dim=False)
    recipe = AORecipeKwargs(config=own)
    recipe.module_filter_func = lambda module, name: True
    assert recipe.config is own
    recipe.pad_inner_dim = True
    assert recipe.config.pad_inner_dim


REGISTERED: list[str] = []


class Registered(Outer):
    """Options with all that a class of the user's may have."""

    def __init_subclass__(cls) -> None:
        REGISTERED.append(cls.__name__)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__new__(cls)
        made.made_by = "new"  # type: ignore[attr-defined]
        return made


@dataclass(slots=True)
class Slotted(Registered):
    extra: int = 1

    def __post_init__(self) -> None:
        Registered.__post_init__(self)
        assert type(copy.deepcopy(self)) is type(self)


def test_odd_classes_that_derive() -> None:
    options = Slotted(size=2)
    options.extra = 5
    options.size = 8
    assert (options.extra, options.half, options.made_by) == (5, 4, "new")  # type: ignore[attr-defined]
    assert set(REGISTERED) == {"Slotted"}
    with pytest.raises(ValueError, match="size 0"):
        options.size = 0


def count_post_inits(library: Any, *, calls_base: bool) -> list[Any]:
    """Return what handlers of a user show whose `__post_init__` does something else each time."""

    @dataclass
    class Doubling(library.DistributedDataParallelKwargs):  # type: ignore[misc,name-defined]
        names: list[str] = field(default_factory=list)
        size: int = 1

        def __post_init__(self) -> None:
            if calls_base and hasattr(super(), "__post_init__"):
                super().__post_init__()
            self.size *= 2
            self.names.append("made")

    handler = Doubling(size=3)
    handler.bucket_cap_mb = 30
    handler.size = 5
    handler.names.append("mine")
    handler.static_graph = True
    seen = [handler.size, handler.names, handler.bucket_cap_mb, handler.to_kwargs()]
    for other in (copy.copy(handler), copy.deepcopy(handler), replace(handler, names=[])):
        seen.append((other.size, other.names))
    return seen


@pytest.mark.parametrize("calls_base", [True, False])
def test_a_post_init_of_the_user_runs_once(calls_base: bool) -> None:
    own, reference = (importlib.import_module(f"{name}.utils") for name in ("notebook_accel", "accelerate"))
    assert count_post_inits(own, calls_base=calls_base) == count_post_inits(reference, calls_base=calls_base)


@dataclass
class Proud(DistributedDataParallelKwargs):
    """Does not call the `__post_init__` of its base."""

    def __post_init__(self) -> None:
        self.made = True


def test_fields_are_checked_whatever_a_post_init_of_the_user_calls() -> None:
    with pytest.raises(ValueError, match="comm_hook 'zip' is unknown"):
        Proud(comm_hook="zip")  # type: ignore[arg-type]
    handler = Proud()
    with pytest.raises(ValueError, match="comm_hook 'zip' is unknown"):
        handler.comm_hook = "zip"  # type: ignore[assignment]
    assert handler.made and handler.comm_hook == "no"


class Sharded(FullyShardedDataParallelPlugin):
    """Sets what it wants after its base has made it."""

    def __init__(self, kind: Any) -> None:
        super().__init__(fsdp_version=2)
        self.wanted = kind
        self.state_dict_type = kind


@dataclass
class Hooked(DistributedDataParallelKwargs):
    """Sets a field after its base has checked all."""

    hook: str = "no"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.comm_hook = self.hook  # type: ignore[assignment]


def test_what_a_class_that_derives_sets_last_is_checked_and_completed() -> None:
    given = Sharded("SHARDED_STATE_DICT")
    plain = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")  # type: ignore[arg-type]
    assert given.state_dict_type is plain.state_dict_type
    assert type(given.state_dict_config) is type(plain.state_dict_config)
    with pytest.raises(ValueError, match="LOCAL_STATE_DICT"):
        Sharded("LOCAL_STATE_DICT")
    with pytest.raises(ValueError, match="comm_hook 'zip' is unknown"):
        Hooked(hook="zip")
    assert Hooked(hook="fp16").comm_hook == DistributedDataParallelKwargs(comm_hook="fp16").comm_hook  # type: ignore[arg-type]

    class Halved(ParallelismConfig):
        def __post_init__(self) -> None:
            super().__post_init__()
            self.tp_size = 2
            super().__post_init__()

    assert isinstance(Halved().tp_handler, type(ParallelismConfig(tp_size=2).tp_handler))


@pytest.mark.parametrize(
    ("given", "name", "value", "strategy"),
    [
        ("HYBRID_SHARD", "reshard_after_forward", True, "HYBRID_SHARD"),
        ("HYBRID_SHARD_ZERO2", "reshard_after_forward", False, "HYBRID_SHARD_ZERO2"),
        ("NO_SHARD", "reshard_after_forward", None, "NO_SHARD"),
        ("HYBRID_SHARD", "reshard_after_forward", False, "SHARD_GRAD_OP"),
        ("SHARD_GRAD_OP", "sharding_strategy", "FULL_SHARD", "FULL_SHARD"),
        ("SHARD_GRAD_OP", "sharding_strategy", None, "FULL_SHARD"),
    ],
)
def test_a_strategy_stays_where_nothing_contradicts_it(
    given: str, name: str, value: Any, strategy: str
) -> None:
    plugin = FullyShardedDataParallelPlugin(sharding_strategy=given)
    setattr(plugin, name, value)
    assert plugin.strategy == strategy


def test_a_name_for_the_present_kind_of_checkpoint_keeps_its_config() -> None:
    plugin = FullyShardedDataParallelPlugin()
    config = plugin.state_dict_config
    plugin.state_dict_type = "full_state_dict"
    assert plugin.state_dict_config is config


def test_a_class_that_derives_from_a_closed_one_has_what_it_wants() -> None:
    class Own(DataLoaderConfiguration):
        @property
        def doubled(self) -> int | None:
            return self.data_seed

        @doubled.setter
        def doubled(self, value: int) -> None:
            self.data_seed = value * 2

    options = Own()
    options.doubled, options.name = 2, "mine"  # type: ignore[attr-defined]
    assert (options.data_seed, options.name) == (4, "mine")  # type: ignore[attr-defined]


@dataclass
class Copied(Outer):
    copies: Any = None

    def __post_init__(self) -> None:
        self.copies = [copy.deepcopy(self), pickle.loads(pickle.dumps(self, 0))]


def test_a_copy_that_a_post_init_makes_is_checked() -> None:
    for other in Copied(size=2).copies:
        with pytest.raises(ValueError, match="size 0"):
            other.size = 0


def test_an_instance_that_no_constructor_made_is_checked_when_it_is_complete() -> None:
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="SIZE_BASED_WRAP", activation_checkpointing=True)
    for items in (fields(plugin), tuple(reversed(fields(plugin)))):
        other = FullyShardedDataParallelPlugin.__new__(FullyShardedDataParallelPlugin)
        for item in items:
            setattr(other, item.name, getattr(plugin, item.name))
        assert other == plugin and other.strategy == "FULL_SHARD"
        with pytest.raises(ValueError, match="SOME"):
            other.sharding_strategy = "SOME"
