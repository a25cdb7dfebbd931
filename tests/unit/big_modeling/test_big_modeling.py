"""Models that are dispatched over the CPU and the disk, and offloaded as a whole."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from notebook_accel import (
    Accelerator,
    CheckpointError,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    hooks,
    infer_auto_device_map,
    init_empty_weights,
    init_on_device,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    utils,
)
from notebook_accel.utils import modeling
from tests.unit.big_models import INPUT, Words, half, kinds_of, save, words
from tests.unit.clock import PATIENCE_S

pytestmark = pytest.mark.filterwarnings("error")
FORMS = ["safetensors", "sharded safetensors", "plain safetensors", "bin", "sharded bin"]


def empty(**options: Any) -> Words:
    with init_empty_weights():
        return Words(**options).eval()


@torch.no_grad()
def output(model: nn.Module) -> Any:
    return model(INPUT)


def test_empty_models_have_shapes_and_shared_weights_and_real_buffers() -> None:
    model = empty()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.head.weight is model.words.weight
    assert not any(buffer.is_meta for buffer in model.buffers())
    with init_empty_weights(include_buffers=True):
        assert all(buffer.is_meta for buffer in Words().buffers())
    with init_on_device(torch.device("meta")):
        frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        holder = nn.ParameterList([frozen, frozen])
    assert holder[0] is holder[1] and holder[0].is_meta and not holder[0].requires_grad
    assert not any(parameter.is_meta for parameter in Words().parameters())


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_checkpoint_gives_the_same_output(tmp_path: Path, form: str) -> None:
    original = words()
    folder = tmp_path / "off"
    model = load_checkpoint_and_dispatch(
        empty(), save(original, tmp_path / "m", form), half(), offload_folder=folder
    )
    for _ in range(3):  # from the second forward on weights are fetched ahead in the order of the first
        assert torch.equal(output(model), output(original))
    places = kinds_of(model)
    assert places["blocks.3.first.weight"] == places["blocks.5.second.bias"] == "meta"
    assert places["blocks.2.first.weight"] == places["blocks.3.scale"] == "cpu"
    assert model.head.weight is model.words.weight
    copied = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    assert copied == (
        [
            f"blocks.{n}.{k}.{w}.dat"
            for n in (3, 4, 5)
            for k in ("first", "second")
            for w in ("bias", "weight")
        ]
        if "bin" in form
        else []
    )
    state = modeling.get_state_dict_offloaded_model(model)
    assert state.keys() == original.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in original.state_dict().items())


def test_dtypes(tmp_path: Path) -> None:
    original = words()
    file = save(original, tmp_path)
    model = load_checkpoint_and_dispatch(empty(), file, half(), dtype="bfloat16")
    same = words().to(torch.bfloat16)
    assert torch.equal(output(model), output(same)) and output(model).dtype == torch.bfloat16
    fresh = empty()
    load_checkpoint_in_model(fresh, file, {"": "cpu"}, dtype=torch.float16, keep_in_fp32_modules=["blocks.0"])
    assert fresh.blocks[0].first.weight.dtype == torch.float32
    assert fresh.blocks[1].first.weight.dtype == torch.float16
    with pytest.raises(ValueError, match="dtype 'float17' is unknown"):
        load_checkpoint_and_dispatch(empty(), file, half(), dtype="float17")


@pytest.mark.parametrize(
    "offload",
    [
        lambda model, folder: cpu_offload(model, offload_buffers=True),
        lambda model, folder: cpu_offload(model, preload_module_classes=["Words"]),
        lambda model, folder: disk_offload(model, folder, preload_module_classes=["Block"]),
        lambda model, folder: dispatch_model(model, {"": "disk"}, offload_dir=folder),
        lambda model, folder: dispatch_model(model, half(), offload_dir=folder, force_hooks=True),
    ],
    ids=["cpu with buffers", "cpu whole", "disk", "disk map", "half"],
)
def test_offloaded_models_compute_the_same_and_come_back(tmp_path: Path, offload: Any) -> None:
    original, model = words(), words()
    offload(model, tmp_path / "off")
    assert "meta" in kinds_of(model).values()
    for _ in range(2):
        assert torch.equal(output(model), output(original))
    assert torch.equal(output(copy.deepcopy(model)), output(original))
    layer = model.blocks[4].first
    if modeling.has_offloaded_params(layer):
        with hooks.align_module_device(layer):
            assert torch.equal(layer.weight, original.blocks[4].first.weight)
        assert layer.weight.is_meta
    hooks.remove_hook_from_submodules(model)
    assert set(kinds_of(model).values()) == {"cpu"}
    assert torch.equal(output(model), output(original))
    del model, layer, offload
    gc.collect()
    left = [thread for thread in threading.enumerate() if "weights of" in thread.name]
    for thread in left:
        thread.join(PATIENCE_S)  # one that has nothing more to fetch ends a moment later
    assert not any(thread.is_alive() for thread in left)


def test_disk_offload_takes_up_what_it_wrote(tmp_path: Path) -> None:
    disk_offload(words(), tmp_path)
    again = disk_offload(empty(), tmp_path, execution_device="cpu")
    assert torch.equal(output(again), output(words()))
    with pytest.raises(CheckpointError, match="holds no offloaded weights"):
        disk_offload(empty(), tmp_path / "none")
    (tmp_path / "head.weight.dat").write_bytes(b"1234")
    with pytest.raises(
        CheckpointError, match=r"head.weight.dat has 4 bytes, and \[50, 16\] of torch.float32"
    ):
        disk_offload(empty(), tmp_path, execution_device="cpu")


def test_a_moved_model_is_refused_and_a_whole_one_is_not_hooked(tmp_path: Path) -> None:
    model = load_checkpoint_and_dispatch(empty(), save(words(), tmp_path), half())
    with pytest.raises(RuntimeError, match=r"model.to\(\): parts of this model are on the CPU or the disk"):
        model.to("cpu")
    plain = dispatch_model(words(), {"": "cpu"})
    assert plain.hf_device_map == {"": "cpu"} and not hasattr(plain, "_hf_hook")
    assert torch.equal(output(plain.to("cpu")), output(words()))


def test_what_is_offloaded_is_saved(tmp_path: Path, clean_runtime: None) -> None:
    model = load_checkpoint_and_dispatch(empty(), save(words(), tmp_path / "a"), half())
    Accelerator(cpu=True).save_model(model, tmp_path / "b")
    fresh = words(1)
    load_checkpoint_in_model(fresh, tmp_path / "b", strict=True)
    assert torch.equal(output(fresh), output(words()))


def test_models_one_after_the_other() -> None:
    first, hook = cpu_offload_with_hook(words(), "cpu")
    second, last = cpu_offload_with_hook(words(1), "cpu", prev_module_hook=hook)
    calls = []
    hook.offload = lambda: calls.append("first leaves")  # type: ignore[method-assign]
    assert torch.equal(output(first), output(words())) and not calls
    assert torch.equal(output(second), output(words(1))) and calls == ["first leaves"]
    last.offload()
    last.remove()
    assert "_hf_hook" not in vars(second)


def test_in_two_steps_with_an_index_in_the_folder(tmp_path: Path) -> None:
    file, folder = save(words(), tmp_path / "m"), tmp_path / "off"
    model = empty()
    with pytest.raises(ValueError, match="give an offload_folder, which gets an index"):
        load_checkpoint_in_model(model, file, half())
    assert set(kinds_of(model).values()) == {"meta", "cpu"}
    load_checkpoint_in_model(model, file, half(), offload_folder=folder)
    assert [path.name for path in folder.iterdir()] == ["index.json"]
    index = json.loads((folder / "index.json").read_text())
    assert index["blocks.3.first.bias"]["safetensors_file"] == str((file / "model.safetensors").resolve())
    assert torch.equal(output(dispatch_model(model, half(), offload_dir=folder)), output(words()))
    loader = utils.OffloadedWeightsLoader(save_folder=folder)
    assert len(loader) == 12 and torch.equal(loader["blocks.3.first.bias"], words().blocks[3].first.bias)


def changed(folder: Path, **tensors: Any) -> Path:
    state = {**words().state_dict(), **tensors}
    torch.save({name: tensor for name, tensor in state.items() if tensor is not None}, folder / "x.bin")
    return folder / "x.bin"


def broken(kind: str, folder: Path) -> Any:
    """Return a checkpoint that is wrong in one way."""
    if kind == "wrong shape":
        return changed(folder, **{"blocks.4.first.bias": torch.ones(3)})
    if kind == "no key":
        return changed(folder, **{"blocks.4.first.bias": None})
    if kind == "unknown key":
        return changed(folder, more=torch.ones(1))
    made = save(words(), folder / "m", "sharded safetensors")
    shard = sorted(made.glob("*.safetensors"))[3]
    if kind == "missing shard":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-8])
    return made


@pytest.mark.parametrize(
    ("kind", "error", "strict"),
    [
        (
            "missing shard",
            r"model-00004-of-000\d\d.safetensors is missing, though model.safetensors.index.json",
            False,
        ),
        ("truncated", r"model-00004-of-000\d\d.safetensors is cut off .* its tensors end at byte", False),
        ("wrong shape", r"x.bin: 'blocks.4.first.bias' has shape \[3\], the model's \[64\]", False),
        ("no key", r"x.bin has no weights for 'blocks.4.first.bias', which are on the meta device", False),
        ("unknown key", r"x.bin has weights that the model does not know: 'more'", True),
    ],
)
def test_a_wrong_checkpoint_changes_nothing(tmp_path: Path, kind: str, error: str, strict: bool) -> None:
    checkpoint = broken(kind, tmp_path)
    model = empty()
    before = dict(model.named_parameters())
    with pytest.raises(CheckpointError, match=error):
        load_checkpoint_and_dispatch(
            model, checkpoint, half(), offload_folder=tmp_path / "off", strict=strict
        )
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert not any("_hf_hook" in vars(part) for part in model.modules())
    assert not (tmp_path / "off").exists()


def test_unknown_keys_are_warned_of(tmp_path: Path) -> None:
    file = changed(tmp_path, more=torch.ones(1))
    with pytest.warns(UserWarning, match=r"has weights that the model does not use: \['more'\]"):
        model = load_checkpoint_and_dispatch(empty(), file, {"": "cpu"})
    assert torch.equal(output(model), output(words()))


def test_wrong_arguments(tmp_path: Path) -> None:
    file = save(words(), tmp_path / "m", "bin")
    with pytest.raises(ValueError, match=r"no device for 'blocks.0.scale', .* and 25 more"):
        load_checkpoint_and_dispatch(empty(), file, {"words": "cpu", "head": "cpu"})
    with pytest.raises(ValueError, match=r"'best' is unknown: .* one of auto, balanced"):
        load_checkpoint_and_dispatch(empty(), file, "best")
    with pytest.raises(ValueError, match="is no file to read it from as it is: give an offload_folder"):
        load_checkpoint_and_dispatch(empty(), file, half())
    with pytest.raises(ValueError, match="give an offload_dir to write them to"):
        dispatch_model(words(), half())
    with pytest.raises(ValueError, match=r"'blocks.3.first.weight' is on the meta device and has no values"):
        dispatch_model(empty(), half())
    with pytest.raises(ValueError, match=r"offload_folder .*: .* is a file"):
        load_checkpoint_and_dispatch(empty(), file, half(), offload_folder=file / "pytorch_model.bin" / "x")
    with pytest.warns(UserWarning, match=r"what the model does not have: \['none'\]"):
        dispatch_model(words(), {"": "cpu", "none": "cpu"})


def test_a_fetch_that_fails_is_told_where_the_weight_is_needed(tmp_path: Path) -> None:
    folder = save(words(), tmp_path, "plain safetensors")
    model = load_checkpoint_and_dispatch(empty(), folder, half())
    output(model)
    kept, written_at = folder.read_bytes(), folder.stat().st_mtime_ns
    folder.write_bytes(kept[:2000])
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read for blocks\.\d\.\w+\.\w+"):
        output(model)
    folder.write_bytes(bytes(len(kept)))  # of the same size, and other weights
    with pytest.raises(
        CheckpointError, match=r"written again after the model was loaded.*load the model again"
    ):
        output(model)
    folder.write_bytes(kept)
    os.utime(folder, ns=(written_at, written_at))
    assert torch.equal(output(model), output(words()))


class Recorder(dict[str, torch.Tensor]):
    """Weights that note who asks for them, and when one of them is asked for."""

    def __init__(self, state: Any, watched: str) -> None:
        super().__init__(state)
        self.asked: list[tuple[str, bool]] = []
        self.watched, self.event = watched, threading.Event()

    def __getitem__(self, name: str) -> torch.Tensor:
        self.asked.append((name, threading.current_thread() is threading.main_thread()))
        if name == self.watched:
            self.event.set()
        return super().__getitem__(name)


def test_the_next_weights_are_fetched_while_a_module_computes() -> None:
    model = words()
    weights = Recorder(model.state_dict(), watched="blocks.0.second.weight")
    layer, seen = model.blocks[0].first, []

    def compute(x: torch.Tensor) -> torch.Tensor:
        seen.append(weights.event.wait(PATIENCE_S))
        return nn.functional.linear(x, layer.weight, layer.bias)

    layer.forward = compute
    cpu_offload(model, state_dict=weights)
    assert torch.equal(output(model), output(words()))
    assert seen == [True]
    ahead = [name for name, is_main in weights.asked if not is_main]
    assert "blocks.0.second.weight" in ahead
    assert len(weights.asked) == len(set(weights.asked)), "nothing is fetched twice"


def test_deleted_models_leave_no_descriptor(tmp_path: Path) -> None:
    folder = Path("/proc/self/fd")
    if not folder.is_dir():
        pytest.skip("this system does not list open files")
    file = save(words(), tmp_path)
    output(load_checkpoint_and_dispatch(empty(), file, half()))
    gc.collect()
    before = len(os.listdir(folder))
    for _ in range(3):
        model = load_checkpoint_and_dispatch(empty(), file, half())
        output(model)
        assert len(os.listdir(folder)) <= before + 1, "no file is open between forwards"
    del model
    gc.collect()
    assert len(os.listdir(folder)) <= before


def test_hooked_models_can_be_pickled(tmp_path: Path) -> None:
    model = load_checkpoint_and_dispatch(empty(), save(words(), tmp_path), half())
    output(model)
    assert torch.equal(output(pickle.loads(pickle.dumps(model))), output(words()))


def test_a_map_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    found = infer_auto_device_map(empty(), {"cpu": 15000}, ["Block"], verbose=True)
    assert found == {"words": "cpu", "head": "cpu"} | {"blocks": "disk", "steps": "disk"}
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[0:1]] == [["part", "size", "device", "why"]]
    assert any(line.startswith("words") and "with head, which shares weights" in line for line in lines)
    assert any(
        "not on cpu: 3.15 KiB left (8.38 KiB kept for the largest layer), Block stays whole" in line
        for line in lines
    )
    assert lines[-1] == "53.41 KiB in all; cpu: 3.12 KiB of 14.65 KiB; disk: 50.29 KiB"


def test_limits() -> None:
    model = empty()
    warnings.filterwarnings("ignore", "max_memory names GPU")
    assert utils.get_max_memory({1: "1GB", "disk": "2GiB", 0: 5, "cpu": 7}) == {
        0: 5,
        1: 10**9,
        "cpu": 7,
        "disk": 2**31,
    }
    assert list(utils.get_max_memory({"cpu": 1})) == ["cpu"]
    asked: dict[int | str, float | str] = {"cpu": "1KB", "disk": 7.5}
    utils.get_max_memory(asked)
    assert asked == {"cpu": 1000, "disk": 7}  # Transformers compares it with what is returned
    free = utils.get_balanced_memory(model)
    assert set(free) == {"cpu"} or 0 in free
    assert utils.get_balanced_memory(model, {"cpu": 10}) == {"cpu": 10}
    for wrong in ({"gpu": 1}, {-1: 1}, {True: 1}):
        with pytest.raises(ValueError, match="max_memory names device"):
            utils.get_max_memory(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="neither a number of bytes nor a text"):
        utils.get_max_memory({"cpu": "1 potato"})


def test_tensors_of_modules(tmp_path: Path) -> None:
    model = words()
    utils.set_module_tensor_to_device(model, "head.weight", "meta")
    assert model.head.weight.is_meta and not model.words.weight.is_meta
    utils.retie_parameters(model, [["head.weight", "words.weight"]])
    assert model.head.weight is model.words.weight
    utils.set_module_tensor_to_device(
        model, "blocks.0.first.bias", "cpu", torch.ones(64), dtype=torch.float16
    )
    assert model.blocks[0].first.bias.tolist() == [1.0] * 64
    assert model.blocks[0].first.bias.dtype == torch.float16
    for name, value, error in (
        ("none.weight", None, "has no module 'none'"),
        ("head.bias", None, "bias' of Linear is None"),
        ("head.x", None, "no parameter and no buffer 'x'"),
        ("head.weight", torch.ones(2), r"has shape \[50, 16\], the value \[2\]"),
    ):
        with pytest.raises(ValueError, match=error):
            utils.set_module_tensor_to_device(model, name, "cpu", value)
    utils.offload_state_dict(tmp_path, {"head.weight": torch.full((50, 16), 2.0)})
    fresh = empty()
    utils.load_offloaded_weights(fresh, utils.OffloadedWeightsLoader(save_folder=tmp_path).index, tmp_path)
    assert fresh.head.weight.unique().tolist() == [2.0]


def test_modules_that_share_count_once() -> None:
    model = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(12))
    for layer in model:
        layer.weight = model[0].weight
    sizes = {f"{index}": 80 for index in range(12)} | {f"{index}.weight": 64 for index in range(12)}
    modules = list(model.named_children())[1:]
    found = utils.get_module_size_with_ties(["1.weight", "11.weight"], 80, sizes, modules)
    assert found == (80 + 2 * 16, ["1", "11"], [model[1], model[11]])
    assert utils.get_module_size_with_ties([], 80, sizes, modules) == (80, [], [])
    with pytest.raises(ValueError, match=r"no module of \['1'.* has the parameter head"):
        utils.get_module_size_with_ties(["head.weight"], 80, sizes, modules)


def test_an_offloaded_model_that_is_loaded_whole_is_whole(tmp_path: Path) -> None:
    """Also where the file that it was offloaded from is another one by now."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    batch = torch.ones(1, 4)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    load_checkpoint_and_dispatch(
        model, tmp_path, device_map={"0": "cpu", "1": "disk"}, offload_folder=tmp_path / "disk"
    )
    model(batch)
    (tmp_path / "model.safetensors").unlink()
    save_file({name: 2 * value for name, value in weights.items()}, tmp_path / "model.safetensors")
    load_checkpoint_and_dispatch(model, tmp_path)
    whole = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    whole.load_state_dict({name: 2 * value for name, value in weights.items()})
    assert torch.equal(model(batch), whole(batch))
    assert not any(parameter.is_meta for parameter in model.parameters())
