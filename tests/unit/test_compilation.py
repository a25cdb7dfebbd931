"""torch.compile on prepared models: the plugin, whole models, repeated blocks, and the way back."""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel

from notebook_accel import init_empty_weights, load_checkpoint_and_dispatch, load_checkpoint_in_model
from notebook_accel.accelerator import Accelerator
from notebook_accel.compilation import DynamoBackend, TorchDynamoPlugin
from notebook_accel.fsdp import FullyShardedDataParallelPlugin
from notebook_accel.state import AcceleratorState
from notebook_accel.utils import (
    compile_regions,
    has_compiled_regions,
    is_compiled_module,
    merge_fsdp_weights,
)
from notebook_accel.utils.modeling import get_state_dict_offloaded_model
from tests.unit.multiprocess import run_ranks


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.norm(self.layer(x)))


class Model(torch.nn.Module):
    """Repeated blocks, and layers around them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(3, 4)
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.last = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.last(x)
        return out


@pytest.fixture
def compiler() -> Iterator[None]:
    """Start with an empty code cache and leave none behind."""
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def step(accelerator: Any, model: Any, batches: int = 2) -> list[float]:
    """Train on a few batches and return the loss of each."""
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for number in range(batches):
        x = torch.linspace(-1, 1, 12).reshape(4, 3) * (1 + number + accelerator.process_index)
        with accelerator.accumulate(model):
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# --- the plugin --------------------------------------------------------------------------------------------------


def test_the_plugin_leaves_defaults_to_torch() -> None:
    plugin = TorchDynamoPlugin()
    assert plugin.backend is DynamoBackend.NO and not plugin.is_active and plugin.to_kwargs() == {}
    assert plugin.to_dict() == {
        "backend": "no",
        "mode": "default",
        "fullgraph": False,
        "dynamic": None,
        "options": None,
        "disable": False,
        "use_regional_compilation": False,
    }
    assert TorchDynamoPlugin(backend="Inductor", fullgraph=True, dynamic=False).to_kwargs() == {  # type: ignore[arg-type]
        "backend": "inductor",
        "fullgraph": True,
        "dynamic": False,
    }


def test_the_environment_says_what_the_arguments_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "BACKEND": "aot_eager",
        "MODE": "max-autotune",
        "USE_FULLGRAPH": "1",
        "USE_DYNAMIC": "no",
        "USE_REGIONAL_COMPILATION": "yes",
    }.items():
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", text)
    plugin = TorchDynamoPlugin()
    assert plugin.backend is DynamoBackend.AOT_EAGER and plugin.use_regional_compilation
    assert plugin.to_kwargs() == {
        "backend": "aot_eager",
        "mode": "max-autotune",
        "fullgraph": True,
        "dynamic": False,
    }
    assert TorchDynamoPlugin(backend=DynamoBackend.EAGER, mode="default").backend is DynamoBackend.EAGER


def test_what_the_plugin_refuses(clean_runtime: None) -> None:
    with pytest.raises(ValueError, match="backend 'fast' is unknown, choose among no, eager, aot_eager"):
        Accelerator(cpu=True, dynamo_backend="fast")
    with pytest.raises(ValueError, match="both given"):
        Accelerator(cpu=True, dynamo_backend="eager", dynamo_plugin=TorchDynamoPlugin())
    with pytest.raises(TypeError, match="must be a TorchDynamoPlugin"):
        Accelerator(cpu=True, dynamo_plugin="eager")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="exclude each other"):
        TorchDynamoPlugin(mode="max-autotune", options={"x": 1})
    with pytest.raises(ValueError, match="make an Accelerator"):
        AcceleratorState()


def test_later_accelerators_compile_as_the_first(clean_runtime: None) -> None:
    first = Accelerator(cpu=True, dynamo_backend="eager")
    assert first.state.dynamo_plugin.backend is DynamoBackend.EAGER
    assert Accelerator()._dynamo is first._dynamo
    assert not Accelerator(dynamo_backend="no")._dynamo.is_active


# --- one process -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("regional", [False, True])
def test_compiled_training_is_as_without(
    clean_runtime: None, compiler: None, regional: bool, precision: str
) -> None:
    plugin = TorchDynamoPlugin(
        backend="aot_eager",  # type: ignore[arg-type]
        fullgraph=precision == "no",
        use_regional_compilation=regional,
    )
    accelerator = Accelerator(cpu=True, dynamo_plugin=plugin, mixed_precision=precision)
    model = Model()
    plain = Accelerator(dynamo_backend="no").prepare(Model())
    prepared = accelerator.prepare(model)
    assert has_compiled_regions(prepared) and is_compiled_module(prepared) is not regional
    assert step(accelerator, prepared, 3) == pytest.approx(step(accelerator, plain, 3), rel=1e-2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    state = accelerator.get_state_dict(prepared)
    assert list(state) == list(Model().state_dict())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-2, atol=1e-3, msg=name)
    assert accelerator.unwrap_model(prepared) is prepared
    assert accelerator.unwrap_model(prepared, keep_torch_compile=False) is model
    assert accelerator.prepare(prepared) is prepared
    if precision == "bf16":
        bare = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
        assert "forward" not in vars(model) and ("forward" in vars(bare)) is not regional


def test_regions_are_compiled_and_the_model_stays(compiler: None) -> None:
    model = Model()
    own = list(model.blocks)
    made: Any = compile_regions(model, backend="eager")
    assert type(made) is Model and made is not model and made._orig_mod is model
    assert all(is_compiled_module(part) for part in (*made.blocks, made.first, made.last))
    assert list(model.blocks) == own and not has_compiled_regions(model)
    assert {id(p) for p in made.parameters()} == {id(p) for p in model.parameters()}
    made.eval()
    x = torch.ones(2, 3)
    assert torch.equal(made(x), model(x))
    whole = compile_regions(torch.nn.Sequential(torch.nn.Linear(1, 1)), backend="eager")
    assert is_compiled_module(whole)
    assert type(copy.deepcopy(made)) is Model


def test_a_model_the_user_compiled_stays_as_it_is(clean_runtime: None, compiler: None) -> None:
    accelerator = Accelerator(cpu=True, dynamo_backend="eager")
    model = Model()
    compiled: Any = torch.compile(model, backend="eager")
    assert accelerator.prepare(compiled) is compiled
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")  # type: ignore[call-overload]
    assert sorted(accelerator.get_state_dict(compiled)) == sorted(Model().state_dict())


# --- two processes -----------------------------------------------------------------------------------------------


def ranks_compiled(regional: bool) -> dict[str, Any]:
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=regional)  # type: ignore[arg-type]
    accelerator = Accelerator(dynamo_plugin=plugin, gradient_accumulation_steps=2)
    model = Model()
    prepared = accelerator.prepare(model)
    plain = Accelerator(dynamo_backend="no", gradient_accumulation_steps=2).prepare(Model())
    seen: dict[str, Any] = {"compiled": step(accelerator, prepared, 4), "plain": step(accelerator, plain, 4)}
    unwrapped = accelerator.unwrap_model(prepared)
    seen["kept"] = has_compiled_regions(unwrapped) and not isinstance(unwrapped, DistributedDataParallel)
    seen["compiled whole"] = is_compiled_module(unwrapped)
    seen["bare"] = accelerator.unwrap_model(prepared, keep_torch_compile=False) is model
    state, other = accelerator.get_state_dict(prepared), accelerator.get_state_dict(plain)
    seen["same"] = list(state) == list(other) and all(
        torch.allclose(state[n].float(), other[n].float(), atol=1e-6) for n in state
    )
    x = torch.full((4, 3), float(accelerator.process_index))
    with accelerator.no_sync(prepared):
        accelerator.backward(prepared(x).sum())
    local = [p.grad.sum().item() for p in model.parameters() if p.grad is not None]
    seen["differ"] = accelerator.gather_for_metrics([local], use_gather_object=True)
    with accelerator.join_uneven_inputs([prepared], even_batches=False):
        for _ in range(1 + accelerator.process_index):
            accelerator.backward(prepared(x).sum())
    accelerator.end_training()
    return seen


def rank_inductor() -> tuple[list[float], list[float], int]:
    torch._inductor.config.compile_threads = 1
    accelerator = Accelerator(dynamo_backend="inductor")
    compiled = step(accelerator, accelerator.prepare(Model()), 3)
    plain = step(accelerator, Accelerator(dynamo_backend="no").prepare(Model()), 3)
    accelerator.end_training()
    return compiled, plain, torch._inductor.metrics.generated_cpp_vec_kernel_count


@pytest.mark.slow
@pytest.mark.may_leak("shared_memory", reason="torch's compiler makes locks in the rank, which ends at once")
@pytest.mark.skipif(
    not shutil.which("g++"), reason="inductor needs the C++ compiler g++, which is not installed"
)
def test_inductor(tmp_path: Path) -> None:
    own = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    ((compiled, plain, kernels),) = run_ranks(rank_inductor, world_size=1, timeout=240, environment=own)
    assert compiled == pytest.approx(plain, rel=1e-4) and kernels > 0


@pytest.mark.parametrize("regional", [False, True])
def test_two_processes(regional: bool) -> None:
    first, second = run_ranks(ranks_compiled, regional)
    for seen in (first, second):
        assert seen["compiled"] == pytest.approx(seen["plain"], rel=1e-5)
        assert seen["kept"] and seen["bare"] and seen["same"] and seen["compiled whole"] is not regional
        assert seen["differ"][0] != seen["differ"][1], "no_sync holds for compiled models too"


def make_net(is_compiled: bool, seed: int = 0) -> torch.nn.Module:
    """Return a model of which parts are compiled by hand, or none."""
    torch.manual_seed(seed)
    inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), inner, torch.nn.Linear(4, 2))
    if is_compiled:
        compiled: Any = torch.compile(inner[0], backend="eager")
        inner[0] = compiled
        compiled = torch.compile(net[2], backend="eager")
        net[2] = compiled
    return net


def prepare_and_step(accelerator: Any, net: torch.nn.Module) -> tuple[torch.nn.Module, Any]:
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(2, 4)).square().sum())
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def numbers(net: torch.nn.Module, optimizer: Any = None) -> list[Any]:
    """Return all weights, and what the optimizer keeps of each."""
    tensors = [tensor.detach() for tensor in net.parameters()]
    if optimizer is not None:
        states = [optimizer.state[parameter] for parameter in net.parameters()]
        tensors += [state[key] for state in states for key in sorted(state)]
    return [(item.full_tensor() if hasattr(item, "full_tensor") else item).tolist() for item in tensors]


NAMES = sorted(make_net(False).state_dict())
BOTH_WAYS = pytest.mark.parametrize(("writes", "reads"), [(True, False), (False, True), (True, True)])


@BOTH_WAYS
def test_weights_of_compiled_parts_have_the_names_of_the_parts(
    tmp_path: Path, clean_runtime: None, compiler: None, writes: bool, reads: bool
) -> None:
    accelerator = Accelerator(cpu=True)
    written = prepare_and_step(accelerator, make_net(writes))
    wanted = numbers(*written)
    assert sorted(accelerator.get_state_dict(written[0])) == NAMES
    for is_safe in (True, False):
        accelerator.save_state(tmp_path / f"state-{is_safe}", is_safe)
        for size in ("1GB", 100):
            accelerator.save_model(written[0], tmp_path / f"model-{is_safe}-{size}", size, is_safe)
    theirs = accelerate.Accelerator(cpu=True)
    prepare_and_step(theirs, make_net(writes))
    theirs.save_state(str(tmp_path / "state-theirs"))
    theirs.save_model(written[0], str(tmp_path / "model-theirs"))
    theirs.save_model(written[0], str(tmp_path / "model-theirs-pickled"), safe_serialization=False)

    accelerator = Accelerator(cpu=True)
    read = prepare_and_step(accelerator, make_net(reads, seed=1))
    for where in tmp_path.glob("state-*"):
        for options in ({}, {"assign": False}):  # the latter by the model's own code
            prepare_and_step(Accelerator(cpu=True), read[0])
            accelerator.load_state(where, **options)
            assert numbers(*read) == wanted, where
    for where in tmp_path.glob("model-*"):
        fresh = make_net(reads, seed=1)
        load_checkpoint_in_model(fresh, where, strict=True)
        assert numbers(fresh) == wanted[: len(NAMES)], where
        with init_empty_weights():
            empty = make_net(reads)
        parts = {"0": "cpu", "1": "cpu" if reads else "disk", "2": "cpu"}
        load_checkpoint_and_dispatch(empty, where, parts, offload_folder=tmp_path / "offload", strict=True)
        state = get_state_dict_offloaded_model(empty)
        assert [state[name].tolist() for name in make_net(False).state_dict()] == wanted[: len(NAMES)], where


def save_and_load_shards(where: Path, writes: bool, reads: bool) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    written = prepare_and_step(accelerator, make_net(writes))
    accelerator.save_state(where)
    accelerator.save_model(written[0], where.parent / "model")
    accelerator.free_memory()
    read = prepare_and_step(accelerator, make_net(reads, seed=1))
    accelerator.load_state(where)
    assert numbers(*read) == numbers(*written)


@BOTH_WAYS
def test_shards_of_compiled_parts_have_the_names_of_the_parts(
    tmp_path: Path, writes: bool, reads: bool
) -> None:
    run_ranks(save_and_load_shards, tmp_path / "state", writes, reads)
    merge_fsdp_weights(tmp_path / "state" / "pytorch_model_fsdp_0", tmp_path / "merged")
    others = {"model": {f"x.{name.replace('.weight', '._orig_mod.weight')}": torch.ones(1) for name in NAMES}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.checkpoint.save(others, checkpoint_id=tmp_path / "others", no_dist=True)
    merge_fsdp_weights(tmp_path / "others", tmp_path / "merged-others")
    assert sorted(load_file(tmp_path / "model" / "model.safetensors")) == NAMES
    assert sorted(load_file(tmp_path / "merged" / "model.safetensors")) == NAMES
    assert sorted(load_file(tmp_path / "merged-others" / "model.safetensors")) == [f"x.{n}" for n in NAMES]
