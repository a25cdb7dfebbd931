"""Tests for the ways to shard: on two and four processes all of them give the losses of one process."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from notebook_accel import Accelerator, CheckpointError, ParallelismConfig, environ
from notebook_accel.checkpointing import weights
from notebook_accel.fsdp import FullyShardedDataParallelPlugin
from notebook_accel.state import AcceleratorState
from notebook_accel.utils import TorchDynamoPlugin, TorchTensorParallelPlugin, merge_fsdp_weights
from tests.unit import gpt
from tests.unit.big_modeling.measured import free_at_once, peak_above, reset_peak
from tests.unit.multiprocess import run_ranks
from tests.unit.strategies import fsdp_hooks

STEPS = 3
BATCH = 8
Case = Callable[[], Any]


def plugin(**options: Any) -> FullyShardedDataParallelPlugin:
    options.setdefault("auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
    return FullyShardedDataParallelPlugin(fsdp_version=2, **options)


def make(**options: Any) -> Accelerator:
    """Return an accelerator that takes nothing over from the one before it."""
    AcceleratorState._reset_state()
    return Accelerator(cpu=True, **options)


def model(seed: int = 0, **options: Any) -> gpt.GPT:
    torch.manual_seed(seed)
    return gpt.GPT(**options)


def adam(trained: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained.parameters(), lr=1e-3)


def train(accelerator: Accelerator, prepared: Any, optimizer: Any) -> list[float]:
    """Return the losses of a few steps, each on one batch of all processes that see different ones."""
    config = accelerator.parallelism_config
    shares = accelerator.num_processes if config is None else config.data_parallel_size
    losses = []
    for batch in accelerator.prepare(gpt.loader(BATCH // shares, STEPS * shares)):
        loss = gpt.loss_of(prepared, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


def trained(built: nn.Module | None = None, **options: Any) -> list[float]:
    accelerator = make(**options)
    return train(accelerator, *accelerator.prepare(built := built or model(), adam(built)))


def only_first_has_values() -> Any:
    accelerator = make(fsdp_plugin=plugin(cpu_ram_efficient_loading=True))
    with torch.device("cpu" if accelerator.is_main_process else "meta"):
        built = model()
    losses = train(accelerator, *accelerator.prepare(built, adam(built)))
    told = {name: environ.get(name) for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")}
    assert set(told.values()) == {"true"}, "transformers looks there"
    assert built.head.weight is built.embedding.weight and built.scale == 1
    assert make().distributed_type == "MULTI_CPU", "the next accelerator is not told by them"
    assert not any(environ.get(name) for name in told)
    make(fsdp_plugin=plugin(cpu_ram_efficient_loading=True))
    AcceleratorState._reset_state(True)
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    assert make().distributed_type == "FSDP", "what the user sets after it counts"
    del os.environ["ACCELERATE_USE_FSDP"]
    return losses


def different_values() -> Any:
    accelerator = make(fsdp_plugin=plugin())
    built = model(seed=accelerator.process_index)
    return train(accelerator, *accelerator.prepare(built, adam(built)))


def optimizer_after() -> Any:
    accelerator = make(fsdp_plugin=plugin())
    prepared = accelerator.prepare(model())
    return train(accelerator, prepared, accelerator.prepare(adam(prepared)))


def optimizer_first() -> Any:
    accelerator = make(fsdp_plugin=plugin())
    built = model()
    optimizer = accelerator.prepare(adam(built))
    return train(accelerator, accelerator.prepare(built), optimizer)


def warm_optimizer() -> Any:
    """Shard what trained whole: the optimizer's state goes along."""
    found = []
    for spread in (None, plugin()):
        accelerator = make(fsdp_plugin=spread)
        built = model()
        optimizer = adam(built)
        for batch in gpt.loader(BATCH, 2):
            gpt.loss_of(built, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(train(accelerator, *accelerator.prepare(built, optimizer)))
    return found


def odd_parts() -> Any:
    """A weight that lies transposed in memory, and a module without weights."""
    accelerator = make(fsdp_plugin=plugin())
    built, up = model(), model().blocks[0].up
    built.blocks[0].up.weight = nn.Parameter(up.weight.detach().t().contiguous().t())
    built, optimizer, loss = accelerator.prepare(built, adam(built), nn.CrossEntropyLoss())
    assert type(loss) is nn.CrossEntropyLoss
    return train(accelerator, built, optimizer)


def no_shard() -> Any:
    accelerator = make(fsdp_plugin=FullyShardedDataParallelPlugin(sharding_strategy="NO_SHARD"))
    prepared, optimizer = accelerator.prepare(built := model(), adam(built))
    assert type(prepared) is nn.parallel.DistributedDataParallel and not accelerator.is_fsdp2
    return train(accelerator, prepared, optimizer)


def wrapped(policy: Any, **options: Any) -> list[str]:
    from torch.distributed.fsdp import FSDPModule

    prepared = make(fsdp_plugin=plugin(auto_wrap_policy=policy, **options)).prepare(model(layers=1))
    return [name for name, part in prepared.named_modules() if isinstance(part, FSDPModule)]


def policies() -> Any:
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        wrapped("size_based_wrap", min_num_params=10**9)
    said = sum("no block of GPT is sharded on its own" in str(item.message) for item in told)
    assert said == int(Accelerator().is_main_process), "rank 0 alone says it"
    return {
        "none": wrapped("no_wrap"),
        "classes": wrapped("transformer_based_wrap", transformer_cls_names_to_wrap="LayerNorm,Block"),
        "size": wrapped("size_based_wrap", min_num_params=4000),
        "torch's": wrapped(ModuleWrapPolicy({gpt.Block})),
        "function": wrapped(lambda module: isinstance(module, nn.Embedding)),
    }


def gradients() -> Any:
    accelerator = make(fsdp_plugin=plugin(ignored_modules=r"places|blocks\.1\.norm2"))
    prepared = accelerator.prepare(built := model())
    batch = list(gpt.loader(BATCH, 2))[
        accelerator.process_index
    ]  # so that gradients of what is ignored differ
    found: dict[str, Any] = {"plain": [type(built.places.weight), type(built.blocks[1].norm2.weight)]}
    with accelerator.no_sync(prepared):
        accelerator.backward(gpt.loss_of(prepared, batch))
        found["quiet"] = built.norm.weight.grad is None
        loss = gpt.loss_of(prepared, batch)
        with accelerator.trigger_sync_in_backward(prepared):
            accelerator.backward(loss)
    largest, also = (
        accelerator.clip_grad_norm_(prepared.parameters(), 1e9, norm) for norm in (torch.inf, "inf")
    )
    assert largest == also
    found["norm"] = float(accelerator.clip_grad_norm_(prepared.parameters(), 1e9))
    accelerator.clip_grad_value_(prepared.parameters(), 1e-3)
    found["largest"] = float(built.norm.weight.grad.full_tensor().abs().max())  # type: ignore[union-attr, operator]
    with pytest.raises(ValueError, match="Leave join_uneven"), accelerator.join_uneven_inputs([prepared]):
        pass
    return found


def half_precision() -> Any:
    found = {}
    for precision in ("bf16", "fp16"):
        accelerator = make(fsdp_plugin=plugin(), mixed_precision=precision)
        prepared, optimizer = accelerator.prepare(built := model().to(torch.bfloat16), adam(built))
        found[precision] = train(accelerator, prepared, optimizer)
        assert prepared(torch.zeros(1, 4, dtype=torch.long)).dtype == torch.float32
        state = accelerator.get_state_dict(prepared)
        assert {value.dtype for value in state.values()} <= {torch.float32}
    return found


def by_hand() -> Any:
    from torch.distributed.fsdp import fully_shard

    accelerator = make(fsdp_plugin=plugin())
    built = model()
    for block in built.blocks:
        fully_shard(block)
    fully_shard(built)
    return train(accelerator, *accelerator.prepare(built, adam(built)))


def on_meta() -> Any:
    def init(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 0.01)
        for buffer in module.buffers(recurse=False):
            buffer.fill_(1)

    accelerator = make(fsdp_plugin=plugin(param_init_fn=init))
    with torch.device("meta"):
        built = gpt.GPT()
    losses = train(accelerator, *accelerator.prepare(built, adam(built)))
    return losses[0] == pytest.approx(torch.tensor(float(gpt.VOCABULARY)).log().item())


def compiled() -> Any:
    found = []
    for regional in (False, True):
        how = TorchDynamoPlugin(backend="eager", use_regional_compilation=regional)  # type: ignore[arg-type]
        accelerator = make(fsdp_plugin=plugin(), dynamo_plugin=how)
        prepared, optimizer = accelerator.prepare(built := model(), adam(built))
        found.append(train(accelerator, prepared, optimizer))
        assert accelerator.unwrap_model(prepared, keep_torch_compile=False) is built
        assert "blocks.0.up.weight" in (accelerator.get_state_dict(prepared) or {"blocks.0.up.weight"})
    return found


def saving(folder: str) -> Any:
    """Save two models with an optimizer over both, go on, and load; then what is wrong with damaged ones."""
    accelerator = make(fsdp_plugin=plugin())
    first, second = model(), model(1, tied=False)
    both = torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=1e-3)
    first, second, optimizer = accelerator.prepare(first, second, both)
    train(accelerator, first, optimizer)
    accelerator.save_state(f"{folder}/two")
    losses = [train(accelerator, first, optimizer) for _ in range(2)]
    accelerator.load_state(f"{folder}/two")
    assert [train(accelerator, first, optimizer) for _ in range(2)] == losses
    accelerator.save_model(second, f"{folder}/weights")
    merge_fsdp_weights(f"{folder}/two/pytorch_model_fsdp_1", f"{folder}/merged")
    before = accelerator.get_state_dict(first)
    again = (model(), model(1, tied=False))
    groups = [{"params": list(part.parameters())} for part in again]
    apart = make(fsdp_plugin=plugin())
    apart.prepare(*again, torch.optim.AdamW(groups))
    with pytest.raises(CheckpointError, match=r"holds 1 groups of parameters, and the optimizer has 2"):
        apart.load_state(f"{folder}/two")
    shard = Path(folder, "two", "pytorch_model_fsdp_0", "__1_0.distcp")
    if accelerator.is_main_process:
        manifest = Path(folder, "two", "notebook_accel.json")
        content = json.loads(manifest.read_text())
        listed = sorted(content["files"])
        manifest.write_text(json.dumps({"version": 1, "files": {}}))  # as older ones, of fewer facts
        os.truncate(shard, shard.stat().st_size // 2)
    accelerator.wait_for_everyone()
    with pytest.raises(CheckpointError, match=r"__1_0.distcp has \d+ bytes, .metadata says \d+ or more"):
        accelerator.load_state(f"{folder}/two")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shard.unlink()
    accelerator.wait_for_everyone()
    with pytest.raises(CheckpointError, match=r"__1_0.distcp is missing"):
        accelerator.load_state(f"{folder}/two")
    unlike = make(fsdp_plugin=plugin())
    unlike.prepare(model(width=16), model(1, tied=False))
    with pytest.raises(CheckpointError, match=r"holds 1 optimizers, and this accelerator has 0"):
        unlike.load_state(f"{folder}/two")
    torch.testing.assert_close(accelerator.get_state_dict(first), before)
    return listed if accelerator.is_main_process else None


def refused() -> Any:
    wrong: dict[str, Case] = {
        r"dp_shard 2 x tp 3 != world 2": lambda: make(
            parallelism_config=ParallelismConfig(dp_shard_size=2, tp_size=3)
        ),
        r"\(dp_replicate 2\): it leaves no processes to shard over": lambda: make(
            fsdp_plugin=plugin(), parallelism_config=ParallelismConfig(dp_replicate_size=2)
        ),
        r"torch's context parallel has no attention for CPUs": lambda: make(
            parallelism_config=ParallelismConfig(cp_size=2)
        ),
        r"NO_SHARD with options of sharding \(cpu_offload\): it is DistributedDataParallel": lambda: make(
            fsdp_plugin=plugin(sharding_strategy="NO_SHARD", cpu_offload=True)
        ),
        r"torch_tp_plugin with parallelism_config: both were given": lambda: make(
            torch_tp_plugin=TorchTensorParallelPlugin(2), parallelism_config=ParallelismConfig(tp_size=2)
        ),
        r"NO_SHARD with options of sharding \(activation_checkpointing, ignored_modules\)": lambda: make(
            fsdp_plugin=plugin(sharding_strategy=3, activation_checkpointing=True, ignored_modules="norm")
        ),
        r"mixed_precision_policy of another half precision \('bf16' and param_dtype torch.float16\)": lambda: (
            make(fsdp_plugin=plugin(mixed_precision_policy="fp16"), mixed_precision="bf16")
        ),
        r"GPT has no module of class Layer to shard": lambda: trained(
            fsdp_plugin=plugin(transformer_cls_names_to_wrap="Layer")
        ),
        r"ignored_modules 'heads' matches": lambda: trained(fsdp_plugin=plugin(ignored_modules="heads")),
        r"the model of rank 1 has other names": lambda: trained(
            model(layers=1 + int(Accelerator().is_main_process)), fsdp_plugin=plugin()
        ),
        r"Linear has no tp_plan": lambda: trained(
            nn.Linear(4, 4), parallelism_config=ParallelismConfig(tp_size=2)
        ),
        r"cannot be divided over tp 2": lambda: trained(
            model(width=33, heads=3), parallelism_config=ParallelismConfig(tp_size=2)
        ),
        r"are one weight, and the tensor parallel plan splits it in two ways": lambda: trained(
            _planned(model(), {"embedding": "rowwise_rep"}), parallelism_config=ParallelismConfig(tp_size=2)
        ),
        r"rank 1 has no values for (\d+) of \1 tensors": lambda: trained(
            _on_first_alone(), fsdp_plugin=plugin(ignored_modules="places")
        ),
    }
    for text, call in wrong.items():
        with pytest.raises((ValueError, NotImplementedError), match=text):
            call()
    odd = model()
    odd.factor = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"'factor' is a single number without a dimension"):
        trained(odd, fsdp_plugin=plugin(activation_checkpointing=True))
    odd.factor = None
    odd.blocks[0].up.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"'up.weight' is torch.bfloat16: bring them to one dtype"):
        trained(odd, fsdp_plugin=plugin())
    whole = {"cpu"} == {parameter.device.type for parameter in odd.parameters()}
    assert whole and "forward" not in vars(odd.blocks[0]), "nothing has changed"


def _planned(built: Any, plan: dict[str, str]) -> Any:
    built.tp_plan = plan
    return built


def _on_first_alone() -> nn.Module:
    with torch.device("cpu" if Accelerator().is_main_process else "meta"):
        return model()


def on_two(folder: str) -> dict[str, Any]:
    alike: dict[str, Case] = {
        "rank 0 alone has values": only_first_has_values,
        "rank 0's values count": different_values,
        "optimizer after": optimizer_after,
        "optimizer first": optimizer_first,
        "odd parts": odd_parts,
        "no shard": no_shard,
        "by hand": by_hand,
        "offload": lambda: trained(fsdp_plugin=plugin(cpu_offload=True, reshard_after_forward=False)),
        "recomputed": lambda: trained(
            fsdp_plugin=plugin(
                activation_checkpointing=True,
                activation_checkpointing_offload=True,
                backward_prefetch="BACKWARD_POST",
                forward_prefetch=True,
            )
        ),
        "tensor parallel": lambda: trained(torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2)),
        "copies": lambda: trained(parallelism_config=ParallelismConfig(dp_replicate_size=2)),
    }
    found: dict[str, Any] = {"alike": {what: case() for what, case in alike.items()}}
    for case in (warm_optimizer, policies, gradients, half_precision, on_meta, compiled, refused):
        found[case.__name__] = case()
    fsdp_hooks.try_all(folder)
    return found | {"saving": saving(folder)}


@pytest.mark.timeout(300)
def test_on_two_processes(clean_runtime: None, tmp_path: Path) -> None:
    expected = trained()
    first, second = run_ranks(on_two, str(tmp_path), timeout=240)
    for what, losses in first["alike"].items():
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4, msg=what)
    torch.testing.assert_close(*first["warm_optimizer"], rtol=1e-4, atol=1e-4)
    for losses in first["compiled"]:
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)
    for losses in first["half_precision"].values():
        torch.testing.assert_close(losses, expected, rtol=0.02, atol=0.1)
    layers = [f"blocks.0.{name}" for name in ("", "norm", "norm2", "up", "down")]
    assert first["policies"] == {
        "none": [""],
        "classes": ["", layers[0][:-1], *layers[1:3], "norm"],
        "size": ["", "blocks.0", *layers[3:]],
        "torch's": ["", "blocks.0"],
        "function": ["", "places"],  # the embedding shares its weight with the head
    }
    assert first["gradients"]["plain"] == [nn.Parameter, nn.Parameter]
    assert first["gradients"]["quiet"] and first["gradients"]["largest"] == pytest.approx(1e-3)
    assert first["gradients"]["norm"] == pytest.approx(second["gradients"]["norm"]) and first["on_meta"]
    folders = {name.partition("/")[0] for name in first["saving"]}
    assert {"pytorch_model_fsdp_0", "pytorch_model_fsdp_1", "optimizer_0"} <= folders
    merged, saved = (weights.read(tmp_path / name / "model.safetensors") for name in ("merged", "weights"))
    torch.testing.assert_close(merged, saved)


def save_both_kinds(folder: str) -> list[set[str]]:
    accelerator = make(fsdp_plugin=plugin(auto_wrap_policy="NO_WRAP"))
    accelerator.prepare(built := nn.Linear(2, 2), adam(built))
    accelerator.save_state(f"{folder}/shards")
    AcceleratorState().fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    accelerator.save_state(f"{folder}/whole")
    accelerator.end_training()
    return [set(os.listdir(f"{folder}/{kind}")) for kind in ("shards", "whole")]


def test_the_kind_of_checkpoint_changes_between_two(tmp_path: Path) -> None:
    ((shards, whole),) = run_ranks(save_both_kinds, str(tmp_path), world_size=1)
    assert {"pytorch_model_fsdp_0", "optimizer_0"} <= shards
    assert {"model.safetensors", "optimizer.bin"} <= whole and "pytorch_model_fsdp_0" not in whole


def memory() -> dict[str, float]:
    """Return peaks while the model is prepared and trained, in parts of what they may be."""
    free_at_once()
    accelerator = make(fsdp_plugin=plugin())
    before = reset_peak()
    with torch.device("cpu" if accelerator.is_main_process else "meta"):
        built = gpt.GPT(width=384, layers=32)
    whole = sum(parameter.nbytes for parameter in built.parameters())
    block = sum(parameter.nbytes for parameter in built.blocks[0].parameters())
    found = {}
    reset_peak()
    prepared = accelerator.prepare(built)
    found["prepare"] = peak_above(before) / (whole / 4)
    optimizer = accelerator.prepare(adam(prepared))
    reset_peak()
    for _ in range(2):  # the second has the optimizer's state from its start
        accelerator.backward(prepared(torch.zeros(1, 4, dtype=torch.long)).sum())
        optimizer.step()
        optimizer.zero_grad()
    found["train"] = peak_above(before) / (1.15 * 4 * whole / 4 + block)
    return found


def on_four(folder: str) -> dict[str, Any]:
    meshes = {
        "copies of shards": {"dp_replicate_size": 2, "dp_shard_size": 2},
        "split shards": {"dp_shard_size": 2, "tp_size": 2},
    }
    found: dict[str, Any] = {}
    for what, sizes in meshes.items():
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Slicing a flattened dim")
            accelerator = make(fsdp_plugin=plugin(), parallelism_config=ParallelismConfig(**sizes))
        prepared, optimizer = accelerator.prepare(built := model(), adam(built))
        losses = train(accelerator, prepared, optimizer)
        accelerator.save_state(f"{folder}/mesh")
        after = train(accelerator, prepared, optimizer)
        accelerator.load_state(f"{folder}/mesh")
        again = train(accelerator, prepared, optimizer)
        ranks = (accelerator.data_parallel_rank, accelerator.data_parallel_shard_rank)
        places = built.blocks[0].up.weight.placements  # type: ignore[union-attr]
        found[what] = {
            "losses": losses,
            "resumed": after == again,
            "ranks": (*ranks, accelerator.tensor_parallel_rank),
            "placements": [type(place).__name__ for place in places],
        }
        accelerator.free_memory()
    hybrid = FullyShardedDataParallelPlugin(sharding_strategy="HYBRID_SHARD", auto_wrap_policy="NO_WRAP")
    found["hybrid"] = trained(fsdp_plugin=hybrid)
    return found | {"memory": memory()}


@pytest.mark.timeout(300)
def test_on_four_processes(clean_runtime: None, tmp_path: Path) -> None:
    expected = trained()
    found = run_ranks(on_four, str(tmp_path), world_size=4, timeout=240)
    for rank, report in enumerate(found):
        torch.testing.assert_close(report["hybrid"], expected, rtol=1e-4, atol=1e-4)
        for what in ("copies of shards", "split shards"):
            torch.testing.assert_close(report[what]["losses"], expected, rtol=1e-4, atol=1e-4)
            assert report[what]["resumed"]
        assert report["copies of shards"]["ranks"] == (rank // 2, rank % 2, 0)
        assert report["copies of shards"]["placements"] == ["Replicate", "Shard"]
        assert report["split shards"]["ranks"] == (0, rank // 2, rank % 2)
        assert report["split shards"]["placements"] == ["_StridedShard", "Shard"]
        assert rank == 0 or report["memory"]["prepare"] <= 1.2, report["memory"]
        assert report["memory"]["train"] <= 1, report["memory"]
