"""What cannot be combined is refused by its row, and docs/combinations.md shows the rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader

from notebook_accel import Accelerator, ParallelismConfig, combinations, fp8, precision, probes
from notebook_accel.accelerator import strategy_table
from notebook_accel.accelerator.prepare import PreparePart
from notebook_accel.comm.single import SingleComm
from notebook_accel.data_loader import prepare_data_loader, rounds
from notebook_accel.data_loader.base import StatefulLoader
from notebook_accel.deepspeed.dummies import DummyOptim
from notebook_accel.deepspeed.plugin import DeepSpeedPlugin
from notebook_accel.deepspeed.strategy import DeepSpeed
from notebook_accel.deepspeed.wrappers import DeepSpeedOptimizerWrapper
from notebook_accel.fsdp import FullyShardedDataParallelPlugin
from notebook_accel.local_sgd import LocalSGD
from notebook_accel.parallelism import TorchTensorParallelPlugin
from notebook_accel.precision import Precision
from notebook_accel.runtime import Runtime
from notebook_accel.strategies import context_parallel
from notebook_accel.strategies.base import Bundle, Plugins
from notebook_accel.strategies.fsdp2 import FullySharded
from notebook_accel.strategies.xla import XlaDevice
from notebook_accel.topology import Topology
from tests.structure.source import ROOT

CPU = torch.device("cpu")


def accelerator(**arguments: Any) -> Any:
    return Accelerator(cpu=True, **arguments)


def plugin(**options: Any) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(fsdp_version=2, **options)


def together(**plugins: Any) -> None:
    strategy_table._check_together(Plugins(**plugins))


def check(
    mode: str = "no", device: str = "cpu", world: int = 1, recipe: bool = False, **plugins: Any
) -> None:
    """Let an accelerator of a run on this device check its arguments."""
    runtime = Runtime(
        topology=Topology(world_size=world, local_world_size=world),
        device=torch.device(device),
        comm=SingleComm(),
    )
    strategy_table.check(runtime, mode, plugins=Plugins(**plugins), has_recipe=recipe)


def deepspeed() -> Any:
    """Return a strategy of DeepSpeed that has prepared two models, without the library."""
    made: Any = object.__new__(DeepSpeed)
    engine = SimpleNamespace(engine=None)
    made.runtime = SimpleNamespace(gradient=SimpleNamespace(sync_gradients=True))
    made._engines, made._quiet = [engine, engine], 0
    return made


def several_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notebook_accel.deepspeed.strategy._needs_own_backward", lambda engine: True)
    deepspeed().backward(torch.ones(()))


def fp16_of_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(
        accelerator=SimpleNamespace(get_accelerator=lambda: SimpleNamespace(is_fp16_supported=lambda: False))
    )
    monkeypatch.setattr(DeepSpeed, "__init__", lambda self, *_: setattr(self, "library", library))
    monkeypatch.setattr(DeepSpeed, "close", lambda self: None)
    DeepSpeed.create(Runtime(topology=Topology(), device=CPU, comm=SingleComm()), *lists())


def lists() -> tuple[Any, Any]:
    return Precision("fp16", CPU), Plugins()


def prepared_by(**attributes: Any) -> Any:
    made: Any = object.__new__(PreparePart)
    vars(made).update(attributes)
    return made


def split_layers(**config: Any) -> None:
    model = torch.nn.Linear(1, 1)
    model.config = SimpleNamespace(**config)  # type: ignore[assignment]
    context_parallel.use_causal_attention(model)


def lomo(world: int, mode: str) -> None:
    made: Any = object.__new__(Accelerator)
    made._optimizers = [SimpleNamespace(steps_in_backward=True)]
    made._runtime = SimpleNamespace(topology=Topology(world_size=world, local_world_size=world))
    made._precision = Precision(mode, CPU)
    made.lomo_backward(torch.ones(()), 0.1)


def close_with_scale() -> None:
    made = accelerator(mixed_precision="fp16")
    weight = torch.nn.Parameter(torch.ones(1))
    made.prepare(torch.optim.SGD([weight], lr=0.1)).step(lambda: weight.sum())


def spread_over_devices() -> None:
    model: Any = torch.nn.Linear(1, 1)
    model.hf_device_map = {"a": 0, "b": 1}
    runtime = SimpleNamespace(topology=Topology(world_size=2, local_world_size=2))
    prepared_by(_runtime=runtime)._refuse_spread(model)


def without_values() -> None:
    made: Any = object.__new__(FullySharded)
    made.runtime = SimpleNamespace(comm=SingleComm())
    with torch.device("meta"):
        model = torch.nn.Linear(1, 1)
    made._require_values(model, "layers")


def local_sgd() -> None:
    strategy = SimpleNamespace(shards_weights=True, owns_backward=False)
    LocalSGD(SimpleNamespace(_strategy=strategy), torch.nn.Linear(1, 1), 1)  # type: ignore[arg-type]


def downcast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DOWNCAST_BF16", "true")
    precision.resolve("no", torch.device("xla"))


def convert_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    monkeypatch.setattr(fp8, "is_sharded", lambda tensor: True)
    fp8.convert(torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3))), fp8.AORecipeKwargs())


def other_fp8_device() -> None:
    if not probes.is_available("torchao"):
        pytest.skip("needs torchao")
    fp8.check(torch.device("mps"))


CASES: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "deepspeed, fsdp": lambda patch: together(deepspeed={}, fsdp=plugin()),
    "deepspeed, parallelism": lambda patch: together(deepspeed={}, parallelism=ParallelismConfig()),
    "deepspeed, compiler": lambda patch: prepared_by(
        _strategy=SimpleNamespace(fills_dummies=True), _dynamo=SimpleNamespace(backend="INDUCTOR")
    )._refuse_strangers([]),
    "deepspeed, fp8": lambda patch: DeepSpeedPlugin().set_mixed_precision("fp8"),
    "deepspeed, fp16 of the device": fp16_of_deepspeed,
    "deepspeed, losses": several_losses,
    "deepspeed, join": lambda patch: deepspeed().joinable(None),
    "deepspeed, clip_grad_value_": lambda patch: deepspeed().clip_grad_value([], 1.0),
    "deepspeed, norm": lambda patch: deepspeed().clip_grad_norm([], 1.0, 1.0),
    "deepspeed, closure": lambda patch: DeepSpeedOptimizerWrapper.step(
        object.__new__(DeepSpeedOptimizerWrapper), lambda: None
    ),
    "dummies": lambda patch: accelerator().prepare(DummyOptim([])),
    "no shard, options": lambda patch: together(
        fsdp=plugin(reshard_after_forward="NO_SHARD", ignored_modules="x")
    ),
    "no shard, dp_shard": lambda patch: together(
        fsdp=plugin(reshard_after_forward="NO_SHARD"), parallelism=ParallelismConfig(dp_shard_size=2)
    ),
    "recompute, no blocks": lambda patch: plugin(activation_checkpointing=True, auto_wrap_policy="NO_WRAP"),
    "first loads, own weights": lambda patch: plugin(
        cpu_ram_efficient_loading=True, sync_module_states=False
    ),
    "local state": lambda patch: plugin(state_dict_type="LOCAL_STATE_DICT"),
    "precision, policy": lambda patch: check(
        "fp16", fsdp=plugin(mixed_precision_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    ),
    "shards, join": lambda patch: object.__new__(FullySharded).joinable(None),
    "shards, optimizer": lambda patch: object.__new__(FullySharded).prepare(
        Bundle(optimizers=(torch.optim.LBFGS([torch.nn.Parameter(torch.ones(1))]),))
    ),
    "local sgd, no whole model": lambda patch: local_sgd(),
    "empty weights, split": lambda patch: without_values(),
    "copies, split": lambda patch: ParallelismConfig(dp_replicate_size=2, tp_size=2),
    "copies, fsdp": lambda patch: check(
        world=2, fsdp=plugin(), parallelism=ParallelismConfig(dp_replicate_size=2)
    ),
    "tp plugin, parallelism": lambda patch: accelerator(
        torch_tp_plugin=TorchTensorParallelPlugin(), parallelism_config=ParallelismConfig()
    ),
    "sequence parallel": lambda patch: together(deepspeed={}, parallelism=ParallelismConfig(sp_size=2)),
    "cp, sp": lambda patch: ParallelismConfig(cp_size=2, sp_size=2),
    "cp, cpu": lambda patch: check(world=2, parallelism=ParallelismConfig(cp_size=2)),
    "cp, recurrent": lambda patch: split_layers(layer_types=["linear_attention"]),
    "cp, windows": lambda patch: split_layers(sliding_window=8),
    "fp8 recipe, precision": lambda patch: check("bf16", recipe=True),
    "fp8, sharded": convert_sharded,
    "fp8, device": lambda patch: other_fp8_device(),
    "lomo, processes": lambda patch: lomo(2, "no"),
    "lomo, fp16": lambda patch: lomo(1, "fp16"),
    "closure, fp16": lambda patch: close_with_scale(),
    "device map, processes": lambda patch: spread_over_devices(),
    "xla, sharded": lambda patch: check(device="xla", fsdp=plugin()),
    "xla, fp16": lambda patch: precision.resolve("fp16", torch.device("xla")),
    "xla, join": lambda patch: object.__new__(XlaDevice).joinable(None),
    "downcast, precision": downcast,
    "dispatch, not placed": lambda patch: prepare_data_loader(
        DataLoader([1]), dispatch_batches=True, put_on_device=False
    ),
    "dispatch, sharded": lambda patch: prepare_data_loader(
        DataLoader([1]), dispatch_batches=True, put_on_device=True, already_sharded=True
    ),
    "stateful, own iteration": lambda patch: prepare_data_loader(
        type("Own", (DataLoader,), {"__iter__": lambda self: iter([1])})([1]), use_stateful_dataloader=True
    ),
    "stateful, other processes": lambda patch: StatefulLoader.start_at_batch(object(), 3),  # type: ignore[arg-type]
    "own shards, other processes": lambda patch: rounds.count_samples([(1, "2 processes")], 4),
}


@pytest.mark.parametrize("name", combinations.TABLE)
def test_every_row_is_raised(name: str, clean_runtime: None, monkeypatch: pytest.MonkeyPatch) -> None:
    row = combinations.TABLE[name]
    before = f"{row.what} with {row.beside}"
    with pytest.raises(row.kind, match=rf"^{re.escape(before)}.*{re.escape(row.instead)}$"):
        CASES[name](monkeypatch)


def test_every_row_has_a_case() -> None:
    assert CASES.keys() == combinations.TABLE.keys()


@pytest.mark.parametrize(
    "arguments",
    [
        {"fsdp_plugin": plugin(mixed_precision_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))},
        {"parallelism_config": ParallelismConfig(dp_shard_size=2)},
    ],
    ids=["policy", "sizes"],
)
def test_a_refused_accelerator_leaves_nothing_behind(arguments: Any, clean_runtime: None) -> None:
    with pytest.raises(ValueError, match=r"param_dtype|!= world"):
        accelerator(mixed_precision="fp16", **arguments)
    assert accelerator(mixed_precision="bf16").mixed_precision == "bf16"


def test_the_page_has_the_table() -> None:
    text = (ROOT / "docs" / "combinations.md").read_text(encoding="utf-8")
    assert combinations.write_into(text) == text, (
        "run: python -m notebook_accel.combinations docs/combinations.md"
    )


def test_sentences_are_whole() -> None:
    for row in combinations.TABLE.values():
        assert not row.reason.endswith(".") and not row.instead.endswith(".")
        assert row.instead[0].isupper() and "|" not in row.reason + row.instead


def test_a_text_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="the text has no <!-- combinations"):
        combinations.write_into("text")
