"""Offloaded weights: used by others, shared, written again, never needed, asked for by threads."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import linear

from notebook_accel import (
    CheckpointError,
    cpu_offload,
    disk_offload,
    dispatch_model,
    hooks,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from notebook_accel.checkpointing import models
from notebook_accel.hooks.align import align_hooks
from notebook_accel.utils import modeling
from notebook_accel.utils.offload import offload_weight
from tests.unit.big_models import INPUT, Words, half, save, words
from tests.unit.clock import PATIENCE_S

ROWS = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))


class Holder(nn.Module):
    """Weights without a forward, of which one is a module that has one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.register_buffer("scale", torch.full((16,), 0.5))
        self.layer = nn.Linear(16, 16)


class Lists(nn.Module):
    """Uses weights of modules inside that cannot be called."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([torch.randn(16, 16) for _ in range(2)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(16, 16))})
        self.holder = Holder()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in (*self.listed, self.named["a"], self.holder.weight):
            x = linear(x, weight)
        return self.holder.layer(x * self.holder.scale)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Lists()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.inner(x))


@torch.no_grad()
def same(model: Any, other: Any, batch: torch.Tensor = ROWS) -> bool:
    return torch.equal(model(batch), other(batch))


def pair(make: Callable[[], nn.Module]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = make().eval()
    return model, copy.deepcopy(model)


@pytest.mark.parametrize(
    "offload",
    [
        lambda model, folder: cpu_offload(model, offload_buffers=True),
        disk_offload,
        lambda model, folder: dispatch_model(model, {"": "disk"}, offload_dir=folder),
        lambda model, folder: dispatch_model(
            model,
            {
                "layer": "cpu",
                "inner.listed": "disk",
                "inner.named": "disk",
                "inner.holder": "disk",
            },
            offload_dir=folder,
        ),
    ],
    ids=["cpu", "disk", "disk map", "map of lists"],
)
def test_weights_of_modules_that_cannot_be_called(tmp_path: Path, offload: Any) -> None:
    model, other = pair(Around)
    offload(other, tmp_path)
    assert other.inner.holder.layer.weight.is_meta
    assert same(model, other) and same(model, copy.deepcopy(other))
    state = modeling.get_state_dict_offloaded_model(other)
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    hooks.remove_hook_from_submodules(other)
    assert not any(tensor.is_meta for tensor in other.state_dict().values()) and same(model, other)


class Tied(nn.Module):
    """Uses a weight of another module, without a bias: torch returns what is in memory then."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16, bias=False), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[0]
        assert isinstance(first, nn.Linear)
        return linear(self.layers(x), first.weight.data.T)


@pytest.mark.parametrize(
    "offload", [lambda model, folder: cpu_offload(model), disk_offload], ids=["cpu", "disk"]
)
def test_weights_that_are_assigned_to_a_hook(tmp_path: Path, offload: Any) -> None:
    model, other = pair(lambda: nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    offload(other, tmp_path)
    assert same(model, other)
    hook = other[1]._hf_hook
    hook.pre_forward(other[1])
    hook.weights_map = {name: tensor.detach() + 1 for name, tensor in other[1].named_parameters()}
    hook.post_forward(other[1], ROWS)
    for tensor in model[1].parameters():
        tensor.data += 1
    assert same(model, other) and same(model, copy.deepcopy(other)) and other[1].weight.is_meta
    assert torch.equal(modeling.get_state_dict_offloaded_model(other)["1.weight"], model[1].weight)
    hooks.remove_hook_from_submodules(other)
    assert same(model, other)


def test_weights_that_are_assigned_within_a_forward(tmp_path: Path) -> None:
    model, other = pair(lambda: nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    disk_offload(other, tmp_path)
    state = {name: torch.ones_like(tensor) for name, tensor in model[1].named_parameters()}

    def assign(*arguments: Any) -> None:
        other[1]._hf_hook.weights_map = state  # what was fetched ahead is the weights before

    other[0].register_forward_hook(assign)
    model[1].load_state_dict(state)
    assert same(model, other) and same(model, other)


def with_pre_hook() -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[1].register_forward_pre_hook(multiply)
    return model


def multiply(layer: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    return (linear(given[0], layer.weight),)


@pytest.mark.parametrize("make", [Tied, with_pre_hook], ids=["tied", "pre-hook"])
@pytest.mark.filterwarnings("ignore:.*no-op")
def test_weights_used_while_they_are_offloaded(tmp_path: Path, make: Any) -> None:
    model, other = pair(make)
    disk_offload(other, tmp_path)
    for one in (other, copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
        with pytest.raises(
            RuntimeError, match=r"linear\(\) was given a weight of shape \[16, 16\] that is offloaded"
        ):
            one(ROWS)
    with pytest.raises(RuntimeError, match="offloaded"):
        other.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    hooks.remove_hook_from_submodules(other)
    assert all(type(parameter) is nn.Parameter for parameter in other.parameters())
    disk_offload(other, tmp_path, preload_module_classes=[type(model).__name__])
    assert same(model, other)


def test_old_weight_norm_is_refused(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="weight_norm"):
        model = nn.Sequential(nn.utils.weight_norm(nn.Linear(16, 16, bias=False)))
    disk_offload(model, tmp_path)
    with pytest.raises(RuntimeError, match=r"a weight of shape .* that is offloaded"):
        model(ROWS)


def test_a_folder_is_written_again_from_what_was_in_it(tmp_path: Path) -> None:
    model = disk_offload(words(), tmp_path)
    name, layer = "blocks.4.first.weight", model.blocks[4].first
    with hooks.align_module_device(layer):  # the weight is pages of its file
        offload_weight(layer.weight, name, tmp_path)
    model = disk_offload(model, tmp_path)
    hooks.remove_hook_from_submodules(model)
    if Path("/proc/self/maps").exists():
        assert str(tmp_path) not in Path("/proc/self/maps").read_text(), "each mapping keeps a file open"
    disk_offload(model, tmp_path)
    assert same(words(), model, INPUT) and not list(tmp_path.glob("*.part*"))


def test_weights_of_the_model_and_of_an_earlier_call(tmp_path: Path) -> None:
    disk_offload(words(), tmp_path)
    model = words()
    with torch.no_grad():
        model.words.weight.add_(1)
    changed = copy.deepcopy(model)
    modeling.set_module_tensor_to_device(model, "blocks.0.first.weight", "meta")
    disk_offload(model, tmp_path, execution_device="cpu")
    assert same(changed, model, INPUT)


def test_shared_weights_change_their_dtype_together(tmp_path: Path) -> None:
    for offloaded in (
        cpu_offload(words()),
        dispatch_model(words(), {"": "disk"}, offload_dir=tmp_path),
    ):
        assert offloaded.head.weight is offloaded.words.weight
        assert same(words().bfloat16(), offloaded.bfloat16(), INPUT)
        assert offloaded.head.weight is offloaded.words.weight


def test_shared_weights_are_shared_again(tmp_path: Path) -> None:
    model = words()
    for offload in (
        cpu_offload,
        lambda model: disk_offload(model, tmp_path / "a"),
        lambda model: dispatch_model(model, {"": "disk"}, offload_dir=tmp_path / "b"),
    ):
        hooks.remove_hook_from_submodules(offload(model))
        assert model.head.weight is model.words.weight and same(words(), model, INPUT)


@pytest.mark.filterwarnings("ignore:model.to")
def test_a_model_that_is_dispatched_again(tmp_path: Path) -> None:
    first, second = save(words(), tmp_path / "a"), save(words(1), tmp_path / "b")
    with init_empty_weights():
        model: Any = Words().eval()
    for file, expected in ((first, words()), (second, words(1)), (first, words())):
        load_checkpoint_and_dispatch(model, file, half())
        assert same(expected, model, INPUT)
        assert len(list(align_hooks(model.blocks[5].first._hf_hook))) == 1, "weights are read once"
    with pytest.raises(
        ValueError, match=r"'blocks\.3\.first\.weight' is on the meta device and has no values"
    ):
        dispatch_model(model, {"": "cpu"}, force_hooks=True)
    with pytest.raises(RuntimeError, match=r"model\.to\(\): parts of this model"):
        dispatch_model(model, {"": "cpu"})
    assert same(words(), model, INPUT)
    load_checkpoint_and_dispatch(model, second, {"": "cpu"}, force_hooks=True)
    assert same(words(1), model, INPUT) and not model.blocks[5].first.weight.is_meta
    load_checkpoint_and_dispatch(model, first, half())
    load_checkpoint_and_dispatch(model, second, {"": "cpu"})
    assert same(words(1), model.to("cpu"), INPUT)


def test_buffers_that_no_checkpoint_has(tmp_path: Path) -> None:
    file = save(words(), tmp_path)
    with init_empty_weights(include_buffers=True):
        model = Words()
    before = dict(model.named_parameters())
    calls: list[Any] = [
        lambda: load_checkpoint_and_dispatch(model, file, half()),
        lambda: disk_offload(model, tmp_path),
        lambda: cpu_offload(model, state_dict=words().state_dict()),
        lambda: dispatch_model(model, half(), state_dict=words().state_dict()),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"'steps' of the model are on the meta device"):
            call()
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert not any("_hf_hook" in vars(part) for part in model.modules())
    model.register_buffer("steps", torch.arange(5)[:, None], persistent=False)
    disk_offload(words(), tmp_path / "off")
    offloaded = disk_offload(model.eval(), tmp_path / "off", "cpu")  # the other buffers are in the folder
    assert same(words(), offloaded, INPUT)


def test_arguments_that_a_map_leaves_no_use_for(tmp_path: Path) -> None:
    file = save(words(), tmp_path)
    for options in ({"broadcast_from_rank0": True}, {"full_state_dict": False}):
        for load in (load_checkpoint_in_model, load_checkpoint_and_dispatch):
            with pytest.raises(ValueError, match=f"{next(iter(options))}=.* no device_map places"):
                load(words(), file, {"": "cpu"}, **options)  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"offload_8bit_bnb=True: .* has no 8-bit layer of bitsandbytes"):
        load_checkpoint_in_model(words(), file, offload_8bit_bnb=True)


def test_a_file_that_cannot_be_read_leaves_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, fresh = (
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
    )
    fresh[1].to("meta")
    save_file(model[0].state_dict(prefix="0."), tmp_path / "a.safetensors")
    save_file(model[1].state_dict(prefix="1."), tmp_path / "b.safetensors")
    index = {name: f"{'ab'[int(name[0])]}.safetensors" for name in model.state_dict()}
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {index}}}'.replace("'", '"'))
    real, before = models.Source.read_into, fresh[0].weight.detach().clone()

    def read_into(source: models.Source, targets: Any) -> None:
        if source.path.name == "b.safetensors":
            raise OSError("the disk is broken")
        real(source, targets)

    monkeypatch.setattr(models.Source, "read_into", read_into)
    with pytest.raises(CheckpointError, match=r"b\.safetensors cannot be read .* the disk is broken"):
        load_checkpoint_in_model(fresh, tmp_path)
    assert torch.equal(fresh[0].weight, before) and fresh[1].weight.is_meta
    monkeypatch.undo()
    load_checkpoint_in_model(fresh, tmp_path, {"": "cpu"}, dtype="bfloat16")
    assert torch.equal(fresh[1].weight, model[1].weight.bfloat16())


class Watched(dict[str, torch.Tensor]):
    """Weights that say when one of them is asked for."""

    def __init__(self, state: Any, name: str) -> None:
        super().__init__(state)
        self.name, self.asked = name, threading.Event()

    def __getitem__(self, name: str) -> torch.Tensor:
        if name == self.name:
            self.asked.set()
        return super().__getitem__(name)


class Halves(nn.Module):
    """Two parts, of which a forward uses the first; the second uses itself again, inside itself."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.tensor(2.0))
        self.first = nn.Linear(16, 16)
        self.second = Again()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) * self.one


class Again(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.wait: Callable[[], Any] = list

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        self.wait()
        return linear(self(x, depth - 1), self.weight) if depth else x


def test_what_no_forward_needs_is_not_fetched() -> None:
    model, other = pair(Halves)
    weights = Watched(model.state_dict(), "second.weight")
    cpu_offload(other, state_dict=weights)
    assert same(model, other)
    for thread in threading.enumerate():
        if (
            thread.name == "weights of the next module"
        ):  # the first forward fetches by the order of the modules
            thread.join()
    weights.asked.clear()
    waited: list[bool] = []
    other.first.register_forward_hook(lambda *given: waited.append(weights.asked.wait(0.2)))
    assert same(model, other) and waited == [False]
    assert torch.equal(other.second(ROWS), model.second(ROWS)), "it is found where it is needed"


def test_a_turn_ends_when_the_weights_are_gone() -> None:
    model, other = pair(Halves)
    cpu_offload(other)
    lead = next(hook for hook in align_hooks(other._hf_hook) if hook.leads is not None)
    assert lead.leads is not None
    end, seen = lead.leads.end, list[bool]()
    lead.leads.end = lambda **options: (seen.append(other.one.is_meta), end(**options))  # type: ignore[method-assign]
    assert same(model, other) and seen == [True]


def test_threads_take_turns_in_a_part_that_uses_itself(tmp_path: Path) -> None:
    model, other = pair(Halves)
    disk_offload(other, tmp_path)
    inside, results = threading.Event(), list[Any]()

    def wait() -> None:
        if not inside.is_set():
            inside.set()
            done.wait(0.3)  # as long as another thread would need to come here and go

    def run() -> None:
        with torch.no_grad():
            try:
                results.append(torch.equal(other.second(ROWS), model.second(ROWS)))
            except RuntimeError as error:
                results.append(error)

    done, other.second.wait = threading.Event(), wait
    thread = threading.Thread(target=run)
    thread.start()
    assert inside.wait(PATIENCE_S)
    run()
    done.set()
    thread.join(PATIENCE_S)
    assert results == [True, True] and other.second.weight.is_meta


@pytest.mark.parametrize("place", ["memory", "disk"])
@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_with_the_offloaded_values_is_loaded(tmp_path: Path, place: str, assign: bool) -> None:
    """As a library does that trains the rest of the model and goes back to an earlier state of it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    with torch.no_grad():
        model[2].weight[0, 0] = torch.nan
    state = {name: value.clone() for name, value in model.state_dict().items()}
    if place == "memory":
        hooks.attach_align_device_hook(model[2], execution_device="cpu", offload=True)
    else:
        dispatch_model(model, {"0": "cpu", "1": "cpu", "2": "disk"}, "cpu", offload_dir=tmp_path / "off")
    state["0.weight"] = torch.ones(4, 4)
    model.load_state_dict(state, assign=assign)
    assert model[0].weight.eq(1).all() and model[2].weight.is_meta
    expected = linear(torch.ones(2, 4), state["2.weight"], state["2.bias"])
    assert torch.equal(model[2](torch.ones(2, 4))[:, 1:], expected[:, 1:])
    changed = {**state, "0.bias": torch.full((4,), 7.0), "2.bias": state["2.bias"] + 1, "gone": torch.ones(1)}
    with pytest.raises(
        RuntimeError, match=r"'2\.bias' is offloaded, and load_state_dict has other values"
    ) as caught:
        model.load_state_dict(changed, assign=assign)
    assert "gone" in str(caught.value), "torch names all that is wrong"
    assert changed["2.weight"] is state["2.weight"], "the caller's dict stays as it was"
    assert model[0].bias.eq(7).all()
    with pytest.raises(RuntimeError, match=r"size mismatch for 2\.bias"):
        model.load_state_dict({**state, "2.bias": torch.ones(5)})
    copied = copy.deepcopy(model)
    copied.load_state_dict(state)
    hooks.remove_hook_from_module(model, recurse=True)
    model.load_state_dict({**state, "2.bias": torch.full((4,), 3.0)}, strict=True)
    if place == "memory":
        assert model[2].bias.eq(3).all()
