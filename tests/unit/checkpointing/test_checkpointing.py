"""Tests for save_state and load_state in one process."""

from __future__ import annotations

import gc
import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState as TheirState

from notebook_accel import Accelerator, CheckpointError
from notebook_accel.checkpointing import names, write
from notebook_accel.handlers import ProjectConfiguration
from tests.unit.checkpoints import Counter, Tied, make_loader, make_parts, step, trained, values
from tests.unit.default_device import make_default

pytestmark = pytest.mark.usefixtures("clean_runtime")


@pytest.fixture
def theirs() -> Any:
    TheirState._reset_state(True)
    yield accelerate.Accelerator(cpu=True)
    TheirState._reset_state(True)


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    parts = trained(accelerator)
    accelerator.step = 7
    assert accelerator.save_state(tmp_path / "kept") == tmp_path / "kept"
    wanted = [step(accelerator, *parts) for _ in range(3)], values(*parts), draw()
    fresh = Accelerator(cpu=True)
    others = fresh.prepare(*make_parts(seed=5))
    fresh.load_state(tmp_path / "kept")
    assert fresh.step == 7
    assert ([step(fresh, *others) for _ in range(3)], values(*others), draw()) == wanted


def test_loading_again_reads_into_the_tensors_that_are_there(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    parts = trained(accelerator)
    accelerator.save_state(tmp_path / "kept")
    wanted = values(*parts)
    step(accelerator, *parts)
    moments = [s["exp_avg"].data_ptr() for s in parts[1].optimizer.state.values()]
    accelerator.load_state(tmp_path / "kept")
    assert values(*parts) == wanted
    assert [s["exp_avg"].data_ptr() for s in parts[1].optimizer.state.values()] == moments


@pytest.mark.parametrize("safe", [True, False])
def test_accelerate_loads_ours(tmp_path: Path, theirs: Any, safe: bool) -> None:
    accelerator = Accelerator(cpu=True)
    parts = trained(accelerator)
    counter = Counter(4)
    accelerator.register_for_checkpointing(counter)
    accelerator.save_state(tmp_path / "kept", safe_serialization=safe)
    after = draw()
    others, other = theirs.prepare(*make_parts(seed=3)), Counter()
    theirs.register_for_checkpointing(other)
    theirs.load_state(tmp_path / "kept")
    assert draw() == after
    assert values(*others) == values(*parts) and other.value == 4


@pytest.mark.parametrize("safe", [True, False])
def test_we_load_accelerates(tmp_path: Path, theirs: Any, safe: bool) -> None:
    others = trained(theirs)
    theirs.register_for_checkpointing(Counter(4))
    theirs.step = 3
    theirs.save_state(tmp_path / "kept", safe_serialization=safe)
    after = draw()
    accelerator = Accelerator(cpu=True)
    parts, counter = accelerator.prepare(*make_parts(seed=3)), Counter()
    accelerator.register_for_checkpointing(counter)
    accelerator.load_state(tmp_path / "kept")
    assert draw() == after and accelerator.step == 3
    assert values(*others) == values(*parts) and counter.value == 4


def test_the_files_have_accelerates_names(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    trained(accelerator)
    trained(accelerator, seed=1)
    accelerator.prepare(make_loader())
    accelerator.register_for_checkpointing(Counter())
    where = accelerator.save_state(tmp_path / "kept")
    found = {path.name for path in where.iterdir()}
    doubled = ("model.safetensors", "optimizer.bin", "scheduler.bin")
    wanted = {names.with_index(name, index) for name in doubled for index in (0, 1)}
    wanted |= {"sampler.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl", "notebook_accel.json"}
    assert found == wanted
    manifest = json.loads((where / names.MANIFEST).read_text())
    assert manifest["files"].keys() == found - {names.MANIFEST}
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"])
def test_a_checkpoint_of_deepspeed_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "pytorch_model_1").mkdir()
    (tmp_path / "pytorch_model_1" / name).touch()
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(Tied())
    with pytest.raises(
        CheckpointError, match=r"was written by DeepSpeed, .* give the Accelerator a DeepSpeedPlugin"
    ):
        accelerator.load_state(tmp_path)


def test_tied_weights_stay_tied(tmp_path: Path, theirs: Any) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Tied())
    accelerator.save_state(tmp_path / "kept")
    theirs_model = theirs.prepare(Tied())
    theirs.load_state(tmp_path / "kept")
    fresh = Accelerator(cpu=True)
    other = fresh.prepare(Tied())
    fresh.load_state(tmp_path / "kept")
    for loaded in (theirs_model, other):
        assert loaded.second.weight is loaded.first.weight
        assert torch.equal(loaded.first.weight, model.first.weight)


def test_the_place_of_loaders_is_kept(tmp_path: Path) -> None:
    from notebook_accel import DataLoaderConfiguration

    def loader() -> tuple[Accelerator, Any]:
        accelerator = Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)
        )
        return accelerator, accelerator.prepare(make_loader())

    accelerator, first = loader()
    list(first)
    accelerator.save_state(tmp_path / "kept")
    wanted = [batch[0].tolist() for _ in range(2) for batch in first]
    torch.manual_seed(99)
    accelerator, second = loader()
    accelerator.load_state(tmp_path / "kept")
    assert second.iteration == 1
    assert [batch[0].tolist() for _ in range(2) for batch in second] == wanted


def test_registered_objects_need_a_state() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(
        ValueError,
        match="these lack one: Item at index 1, int 3, Item at index 2, str 'x'",
    ):
        accelerator.register_for_checkpointing(Counter(), 3, "x")
    assert accelerator._custom_objects == []


def test_hooks_see_models_and_folder_and_can_be_removed(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    seen: list[Any] = []

    def on_save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        seen.append(("save", models[0] is model, weights.pop().keys()))
        (Path(output_dir) / "extra").mkdir()
        (Path(output_dir) / "extra" / "config.json").write_text("{}")

    def on_load(models: list[Any], input_dir: str) -> None:
        seen.append(("load", models.pop() is model, (Path(input_dir) / "extra" / "config.json").read_text()))

    saving = accelerator.register_save_state_pre_hook(on_save)
    loading = accelerator.register_load_state_pre_hook(on_load)
    accelerator.save_state(tmp_path / "kept")
    assert not (tmp_path / "kept" / names.SAFE_MODEL).exists()
    accelerator.load_state(tmp_path / "kept")
    assert [item[:2] for item in seen] == [("save", True), ("load", True)] and seen[1][2] == "{}"
    saving.remove()
    loading.remove()
    accelerator.save_state(tmp_path / "kept")
    accelerator.load_state(tmp_path / "kept")
    assert len(seen) == 2 and (tmp_path / "kept" / "extra" / "config.json").exists()


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda a, p: a.save_state(), "needs output_dir"),
        (lambda a, p: a.load_state(), "needs input_dir"),
        (lambda a, p: a.load_state(p / "none"), "no folder with a checkpoint"),
        (lambda a, p: a.save_state(Path.cwd()), "working folder"),
        (lambda a, p: a.save_state(Path("/proc")), "mount point"),
        (lambda a, p: a.save_state(p / "x", exclude=1), "does not know exclude"),
        (lambda a, p: ProjectConfiguration(p, total_limit=0), "total_limit 0 < 1"),
        (lambda a, p: ProjectConfiguration(p, iteration=-1), "iteration -1 < 0"),
    ],
)
def test_wrong_arguments(tmp_path: Path, call: Callable[[Any, Path], Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call(Accelerator(cpu=True), tmp_path)
    assert not list(tmp_path.iterdir())


def test_async_save_is_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    parts = trained(accelerator)
    counter = Counter(1)
    accelerator.register_for_checkpointing(counter)
    wanted = values(*parts)
    go = threading.Event()
    finish = write.finish
    monkeypatch.setattr(write, "finish", lambda *arguments: (go.wait(30), finish(*arguments)))
    for number in range(2):  # the second reuses the memory of the first
        go.clear()
        accelerator.save_state(tmp_path / f"kept{number}", async_save=True)
        assert not (tmp_path / f"kept{number}").exists()
        step(accelerator, *parts)
        counter.value = 2
        go.set()
        accelerator.load_state(tmp_path / f"kept{number}")
        assert values(*parts) == wanted and counter.value == 1
    accelerator.save_state(tmp_path / "last", async_save=True)
    accelerator.end_training()
    assert (tmp_path / "last" / names.MANIFEST).exists()


def test_an_error_of_the_thread_is_raised_at_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = Accelerator(cpu=True)
    trained(accelerator)

    def full(self: write.File, where: Path) -> None:
        raise OSError(28, "No space left on device")

    calls: list[Callable[[], object]] = [
        lambda: accelerator.save_state(tmp_path / "next"),
        lambda: accelerator.load_state(tmp_path / "kept"),
        accelerator.end_training,
    ]
    for call in calls:
        with monkeypatch.context() as patch:
            patch.setattr(write.File, "write", full)
            accelerator.save_state(tmp_path / "kept", async_save=True)
            accelerator._writer._join()
        with pytest.raises(CheckpointError, match=r"rank 0: OSError: .*No space left"):
            call()
        assert not list(tmp_path.iterdir())
    accelerator.save_state(tmp_path / "kept")
    gc.collect()


def test_numbers_of_numpy(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=np.logspace(-3, -2, 2)[0])
    )
    accelerator.save_state(tmp_path / "kept")
    optimizer.param_groups[0]["lr"] = 0.5
    accelerator.load_state(tmp_path / "kept")
    assert optimizer.param_groups[0]["lr"] == 0.001


class LowRank(torch.optim.Optimizer):
    """State of a foreign optimizer: a name of Adam's of another shape, and one that appears later."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["exp_avg"] = torch.full((1, 2), float(self.steps))
            if self.steps > 1:
                self.state[parameter]["slow"] = torch.zeros(1)


def test_optimizers_of_others_may_have_any_state(tmp_path: Path) -> None:
    def make() -> tuple[Accelerator, Any]:
        accelerator = Accelerator(cpu=True)
        model = torch.nn.Linear(3, 3)
        return accelerator, accelerator.prepare(model, LowRank(model.parameters()))[1]

    accelerator, optimizer = make()
    optimizer.step()
    accelerator.save_state(tmp_path / "kept")
    optimizer.step()
    accelerator.load_state(tmp_path / "kept")
    fresh, other = make()
    fresh.load_state(tmp_path / "kept")
    for found in (optimizer, other):
        states = found.state_dict()["state"].values()
        assert [list(state) for state in states] == [["exp_avg"]] * 2
        assert all(bool((state["exp_avg"] == 1).all()) for state in states)


@pytest.mark.parametrize("async_save", [True, False])
@pytest.mark.parametrize("safe", [True, False])
def test_lazily_conjugated_tensors(tmp_path: Path, safe: bool, async_save: bool) -> None:
    made = torch.randn(3, dtype=torch.complex64)
    models = [torch.nn.Module() for _ in range(3)]
    for model, weight in zip(models, (made.conj(), made.clone(), made.clone().conj()), strict=True):
        model.weight = torch.nn.Parameter(weight)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(models[0])
    accelerator.save_state(tmp_path / "kept", safe, async_save=async_save)
    accelerator.end_training()
    for model in models:
        with torch.no_grad():
            model.weight.zero_()  # type: ignore[operator]
        fresh = Accelerator(cpu=True)
        fresh.prepare(model)
        fresh.load_state(tmp_path / "kept")
        if model is models[0]:
            wanted = model.weight.detach().resolve_conj().tolist()  # type: ignore[operator]
        assert model.weight.detach().resolve_conj().tolist() == wanted != [0, 0, 0]  # type: ignore[operator]


def test_weights_that_only_torch_save_can_hold(tmp_path: Path) -> None:
    quantized = torch.quantize_per_tensor(torch.arange(3.0), 0.5, 0, torch.qint8)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    model.register_buffer("quantized", quantized.clone())
    prepared = accelerator.prepare(model)
    accelerator.save_state(tmp_path / "kept", safe_serialization=False)
    prepared.quantized.copy_(torch.zeros(3))
    accelerator.load_state(tmp_path / "kept")
    assert torch.equal(prepared.quantized.dequantize(), quantized.dequantize())


@pytest.mark.parametrize("safe", [True, False])
def test_weights_without_values(tmp_path: Path, safe: bool) -> None:
    accelerator = Accelerator(cpu=True, device_placement=False)
    model = torch.nn.Linear(2, 2, device="meta")
    accelerator.prepare(model)
    for call in (accelerator.save_state, lambda *args: accelerator.save_model(model, *args)):
        arguments = (
            (tmp_path / "kept", safe) if call == accelerator.save_state else (tmp_path / "kept", 100, safe)
        )
        with pytest.raises(ValueError, match="'weight' is on the meta device"):
            call(*arguments)
    assert not list(tmp_path.iterdir())


def test_tensors_may_be_made_elsewhere_by_default(tmp_path: Path, clean_runtime: None) -> None:
    """`torch.set_default_device` is about users' tensors, not about those of checkpoints."""
    accelerator = Accelerator(cpu=True)
    parts = accelerator.prepare(*make_parts())
    step(accelerator, *parts)
    wanted = values(*parts)
    where = tmp_path / "kept"
    for safe in (True, False):
        for background in (False, True):
            with make_default("meta"):
                accelerator.save_state(where, safe, async_save=background)
                accelerator.end_training()
            step(accelerator, *parts)
            with make_default("meta"):
                accelerator.load_state(where)
            assert values(*parts) == wanted


def test_saving_in_the_middle_of_an_accumulation_warns(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(
        model := torch.nn.Linear(1, 1), torch.optim.SGD(model.parameters())
    )
    for number in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            optimizer.zero_grad()
        if number == 0:
            with pytest.warns(UserWarning, match="the gradients so far are not saved") as warned:
                accelerator.save_state(tmp_path / "middle")
            assert Path(warned[0].filename) == Path(__file__)
    accelerator.save_state(tmp_path / "boundary")  # a warning would be an error


def test_checkpoints_are_written_and_read_in_inference_mode(tmp_path: Path) -> None:
    """The threads that compare checksums are not in the mode of the caller."""
    accelerator = Accelerator(cpu=True)
    width = 800  # several blocks of a checksum
    model = torch.nn.Linear(width, width)
    prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), momentum=0.9))
    with torch.inference_mode():
        accelerator.save_state(tmp_path / "kept", safe_serialization=False)
        accelerator.load_state(tmp_path / "kept")
    assert prepared.weight.shape == (width, width)


def test_an_option_that_torch_does_not_know_is_no_damage(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    trained(accelerator)
    accelerator.save_state(tmp_path / "kept")
    with pytest.raises(TypeError, match="bogus"):
        accelerator.load_state(tmp_path / "kept", load_kwargs={"bogus": 1})
