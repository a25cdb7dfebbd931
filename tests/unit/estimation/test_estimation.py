"""Tests for the memory that models need, and for `notebook-accel estimate-memory`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import calculate_maximum_sizes

from notebook_accel import probes
from notebook_accel.checkpointing import shards
from notebook_accel.cli.estimate_memory import size_text
from notebook_accel.cli.main import main
from notebook_accel.errors import CheckpointError
from notebook_accel.estimation import building, sizes, sources
from tests import forker
from tests.structure.source import ROOT
from tests.unit.checkpoints import Tied

CODE = """
import torch

class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = torch.nn.Linear(width, 4 * width, bias=False)
        self.down = torch.nn.Linear(4 * width, width, bias=False)

class Net(torch.nn.Module):
    _no_split_modules = ["Block"]
    def __init__(self, width=8, depth=2):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.embed = torch.nn.Embedding(30, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = torch.nn.BatchNorm1d(width)
        self.head = torch.nn.Linear(width, 30, bias=False)
        self.head.weight = self.embed.weight

class Reads(torch.nn.Module):  # values while it is built, as vision transformers do
    def __init__(self):
        super().__init__()
        self.rates = [x.item() for x in torch.linspace(0, 1, 3)]
        weight = torch.nn.Parameter(torch.zeros(5, 5))
        self.a, self.b = torch.nn.Linear(5, 5, bias=False), torch.nn.Linear(5, 5, bias=False)
        self.a.weight = self.b.weight = weight

class Huge(torch.nn.Linear):
    def __init__(self):
        super().__init__(1 << 20, 1 << 20)

class Lazy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.part = torch.nn.LazyLinear(3)

def make(): return Net(4, depth=1)
def needs(width, *, depth): return Net(width, depth)
def nothing(): return {}
def fails(): raise RuntimeError("no weights today\\nand more")
def leaves(): raise SystemExit("gone")
def empty(): return torch.nn.ReLU()
instance = Net()
number = 3
class Plain: pass
"""
WIDTH_8 = 3 + 30 * 8 + 2 * 64 * 8 + 2 * 8  # trained values: scale, embedding, blocks, norm
BUFFERS = 2 * 8 * 4 + 8  # running mean and variance, and a count of 64 bits


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder, with code in it."""
    (tmp_path / "thecode.py").write_text(CODE)
    (tmp_path / "broken.py").write_text("import thecode\nimport not_there_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("thecode", "broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def needs(model: str, **options: Any) -> dict[str, sizes.Need]:
    inventory = sources.find(model, **options)
    return {dtype: sizes.estimate(inventory, dtype) for dtype in sizes.BITS}


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = str(ROOT)
    return forker.run(
        [sys.executable, "-m", "notebook_accel", "estimate-memory", *arguments],
        env={**os.environ, "PYTHONPATH": root, "HF_HUB_OFFLINE": "1"},
        cwd=folder,
        timeout=240,
    )


@pytest.mark.parametrize("model", ["thecode:Net", "thecode:instance"])
def test_a_model_in_code(here: Path, model: str) -> None:
    found = needs(model)
    assert found["float32"].total == 4 * WIDTH_8 + BUFFERS
    assert found["float32"].training == 16 * WIDTH_8 + BUFFERS
    # the mean, the variance and every weight at 16 bits, the count as it is
    assert found["bfloat16"].total == 2 * WIDTH_8 + 2 * 8 * 2 + 8
    assert found["bfloat16"].training == 18 * WIDTH_8 + BUFFERS + 2 * 8 * 2
    assert found["float16"].training == found["bfloat16"].training
    assert found["int4"].total == 2 + (WIDTH_8 - 3) // 2 + 8 + 8
    assert found["int4"].training is None
    # a block that stays whole is larger than each layer in it
    assert (found["float32"].layer, found["float32"].largest_layer) == ("blocks.0", 4 * 2 * 32 * 8)


def test_what_a_step_of_adam_holds(here: Path) -> None:
    """The formula beside the tensors that training has."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Linear(50, 10))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(2, 40)).float().sum()
    loss.backward()
    optimizer.step()
    held = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    held += [v for state in optimizer.state.values() for k, v in state.items() if k != "step"]
    assert {tensor.dtype for tensor in held} == {torch.float32}
    inventory = sizes.list_tensors(model, "it")
    bytes_held = sum(tensor.nbytes for tensor in held)
    assert sizes.estimate_training(inventory.parts, "float32") == bytes_held
    copies = 2 * sum(tensor.numel() for tensor in model.parameters())
    assert sizes.estimate_training(inventory.parts, "bfloat16") == bytes_held + copies


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 64, batch_first=True), 2),
        lambda: torch.nn.Sequential(torch.nn.Embedding(50, 4), torch.nn.Linear(4, 60)),
        Tied,
    ],
)
def test_total_and_largest_layer_are_the_references(make: Any) -> None:
    model = make()
    total, (largest, _) = calculate_maximum_sizes(model)
    found = sizes.estimate(sizes.list_tensors(model, "it"), "float32")
    assert (found.total, found.largest_layer) == (total, largest)


def test_a_tensor_beside_submodules_counts_as_a_layer() -> None:
    """Attention has a weight of its own beside a linear layer, which Accelerate 1.15 leaves out."""
    model = torch.nn.Sequential(torch.nn.MultiheadAttention(16, 2))
    found = sizes.estimate(sizes.list_tensors(model, "it"), "float32")
    assert (found.layer, found.largest_layer) == ("0.in_proj_weight", 4 * 3 * 16 * 16)
    assert calculate_maximum_sizes(model)[1][0] < found.largest_layer


def test_factories_and_their_arguments(here: Path) -> None:
    assert needs("thecode:make")["float32"].layer == "blocks.0"
    positional, named = needs("thecode:Net", arguments=[8]), needs("thecode:Net", arguments={"depth": 2})
    assert positional == named == needs("thecode:Net")
    assert needs("thecode:needs", arguments={"width": 8, "depth": 2}) == needs("thecode:Net")


def test_what_reads_values_while_it_is_built(here: Path) -> None:
    found = needs("thecode:Reads")["float32"]
    assert (found.total, found.largest_layer) == (100, 100)
    built = building.from_import_path("thecode:Reads")
    assert all(parameter.device.type == "meta" for parameter in built.parameters())


def test_nothing_is_allocated(here: Path) -> None:
    found = needs("thecode:Huge")["float32"]
    assert found.total == 4 * ((1 << 40) + (1 << 20))
    instance = building.from_import_path("thecode:instance")
    assert all(tensor.device.type == "meta" for tensor in instance.state_dict().values())
    assert torch.nn.Linear(2, 2).weight.device.type == "cpu"  # hooks are gone


def test_frozen_weights_need_no_gradients() -> None:
    model = torch.nn.Linear(10, 10, bias=False).requires_grad_(False)
    found = sizes.list_tensors(model, "it")
    assert sizes.estimate_training(found.parts, "float32") == 400
    assert sizes.estimate_training(found.parts, "float16") == 600


@pytest.mark.parametrize(
    ("model", "options", "text"),
    [
        ("nowhere.at:all", {}, "there is no module 'nowhere', neither installed nor in"),
        ("thecode.part:x", {}, "there is no module|thecode.part cannot be imported"),
        (
            "broken:Net",
            {},
            "broken cannot be imported: ModuleNotFoundError: No module named 'not_there_at_all'",
        ),
        ("thecode:Nett", {}, "thecode has no 'Nett', did you mean 'Net'?"),
        ("thecode:number", {}, r"thecode:number is a value \(int\), neither a torch.nn.Module"),
        ("thecode:Plain", {}, r"thecode:Plain is a class \(Plain\), neither a torch.nn.Module"),
        ("thecode:nothing", {}, "thecode:nothing returned a dict, no torch.nn.Module"),
        (
            "thecode:needs",
            {},
            r"takes \(width, \*, depth\): missing a required .* give arguments as JSON, --args",
        ),
        ("thecode:make", {"arguments": [1]}, "too many positional arguments"),
        ("thecode:instance", {"arguments": [1]}, "is a model already and takes no arguments"),
        ("thecode:fails", {}, "thecode:fails cannot be built: RuntimeError: no weights today$"),
        ("thecode:leaves", {}, "thecode:leaves cannot be built: SystemExit: gone"),
        ("thecode:empty", {}, "has no parameters and no buffers"),
        ("thecode:Lazy", {}, "'part.weight' is lazy"),
        ("gone.safetensors", {}, "gone.safetensors is no file and no folder"),
        ("a/b/c", {}, "a/b/c is no file and no folder; models are named"),
        ("thecode.py", {}, "thecode.py is no file of weights: their names end with .safetensors"),
        ("thecode.py", {"arguments": [1]}, "arguments are for import paths"),
        (".", {}, "holds neither weights"),
    ],
)
def test_what_is_no_model_is_refused(here: Path, model: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text.replace("?", r"\?")):
        sources.find(model, **options)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("size", ["10GB", 40])
def test_weights_are_counted_by_their_headers(tmp_path: Path, safe: bool, size: int | str) -> None:
    state = torch.nn.Sequential(Tied(), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 5)).state_dict()
    shards.save_weights(state, tmp_path / "it", size, safe)
    inventory = sources.find(str(tmp_path / "it"))
    found = sizes.estimate(inventory, "float32")
    assert found.total == 4 * (16 + 16 + 25) + 8  # the tied weight once, a norm of four tensors and a count
    assert (found.layer, found.largest_layer) == ("2", 100)
    assert "neither which blocks stay whole" in inventory.notes[-1]
    index = sorted((tmp_path / "it").glob("*.index.json"))
    for path in index or [next((tmp_path / "it").iterdir())]:
        assert sizes.estimate(sources.find(str(path)), "float32") == found


def test_only_the_header_of_a_file_is_read(tmp_path: Path) -> None:
    head = json.dumps(
        {"w.weight": {"dtype": "BF16", "shape": [1 << 17, 1 << 17], "data_offsets": [0, 1 << 35]}}
    )
    with open(tmp_path / "any.safetensors", "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head.encode())
        file.truncate(8 + len(head) + (1 << 35))  # 32 GiB of nothing
    assert needs(str(tmp_path / "any.safetensors"))["bfloat16"].total == 1 << 35
    assert needs(str(tmp_path))["int8"].total == 1 << 34


def test_a_model_among_other_things_in_a_file(tmp_path: Path) -> None:
    state = {"epoch": 3, "state_dict": {"a.weight": torch.zeros(3, 4)}, "optimizer": {"x": torch.zeros(100)}}
    torch.save(state, tmp_path / "last.pth")
    assert needs(str(tmp_path / "last.pth"))["float32"].total == 48
    torch.save([1, 2], tmp_path / "other.pt")
    torch.save({"epoch": 3}, tmp_path / "third.pt")
    for name, text in (("other.pt", "holds a list"), ("third.pt", "holds no weights by name")):
        with pytest.raises(CheckpointError, match=text):
            sources.find(str(tmp_path / name))
    with pytest.raises(ValueError, match=r"several files of weights, name one: last.pth, other.pt, third.pt"):
        sources.find(str(tmp_path))


@pytest.mark.parametrize("name", ["x.safetensors", "x.bin"])
def test_broken_files_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"no weights at all")
    with pytest.raises(CheckpointError, match=f"{name} is cut off"):
        sources.find(str(tmp_path / name))


def test_a_config_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=40,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    model = transformers.LlamaForCausalLM(config)
    found = needs(str(tmp_path))["float32"]
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert found.total == 4 * (weights + sum(buffer.numel() for buffer in model.buffers()))
    layer = model.model.layers[0]
    assert found.layer == "model.layers.0"
    assert found.largest_layer == 4 * sum(parameter.numel() for parameter in layer.parameters())
    assert needs(str(tmp_path / "config.json"))["float32"] == found


def test_without_the_library_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "is_available", lambda name: False)
    with pytest.raises(ValueError, match="some/model needs transformers: pip install transformers"):
        sources.find("some/model")
    with pytest.raises(ValueError, match="resnet18 needs timm: pip install timm"):
        sources.find("resnet18", library="timm")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match="needs transformers"):
        sources.find(str(tmp_path))
    shards.save_weights({"a.weight": torch.zeros(2)}, tmp_path)
    inventory = sources.find(str(tmp_path))
    assert sizes.estimate(inventory, "float32").total == 8
    assert inventory.notes[0].startswith("config.json was not used: ")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="has no model_type"):
        sources.find(str(tmp_path / "other.json"))


def test_models_of_timm(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "timm.py").write_text(
        "import torch\n"
        "def create_model(name, pretrained):\n"
        "    assert not pretrained\n"
        "    return torch.nn.Linear(len(name), 1, bias=False)\n"
    )
    monkeypatch.syspath_prepend(str(here))
    monkeypatch.setattr(probes, "is_available", lambda name: True)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    assert needs("resnet18", library="timm")["float32"].total == 4 * len("resnet18")
    assert needs("timm/resnet18", library="timm")["float32"].total == 4 * len("hf-hub:timm/resnet18")
    del sys.modules["timm"]


def test_the_command(here: Path) -> None:
    done = command(here, "thecode:Net", "--dtypes", "float32", "int8")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"thecode:Net: {WIDTH_8 + 17:,} values, {WIDTH_8:,} of them trained"
    assert [line.split()[0] for line in lines[1:4]] == ["dtype", "float32", "int8"]
    assert "2.00 KiB (blocks.0)" in lines[2]
    assert lines[3].endswith(" -")
    assert "Activations are not in it" in lines[4]
    found = json.loads(command(here, "--dtypes=float32,bfloat16", "thecode:Net", "--json").stdout)
    assert list(found["dtypes"]) == ["float32", "bfloat16"]
    assert found["dtypes"]["float32"]["training"] == 16 * WIDTH_8 + BUFFERS


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["thecode:Net", "--dtypes", "int3"],
            "dtype 'int3' is unknown, choose from float32, float16, bfloat16, int8",
        ),
        (["thecode:Net", "--args", "{"], "--args '{' is no JSON"),
        (["thecode:Net", "--args", "3"], "--args '3' is neither an object"),
        (["thecode:Other"], "thecode has no 'Other'"),
    ],
)
def test_the_command_refuses_in_one_sentence(
    here: Path, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["estimate-memory", *arguments])
    found = capsys.readouterr()
    assert end.value.code == 2
    assert found.out == ""
    lines = [
        line for line in found.err.splitlines() if not line.startswith("......")
    ]  # a slow machine's progress
    assert len(lines) == 1
    assert lines[0].startswith(f"Error: {text}")


def test_a_hub_id_without_a_network_is_refused(here: Path) -> None:
    pytest.importorskip("transformers")
    done = command(here, "nobody/has-this-model")
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "Error: transformers finds no config of 'nobody/has-this-model', and no file or folder has"
    )
    assert "connect" in last


def test_a_table_is_drawn_at_a_terminal(here: Path) -> None:
    pexpect = pytest.importorskip("pexpect")
    root = str(ROOT)
    shown = pexpect.run(
        f"{sys.executable} -m notebook_accel estimate-memory thecode:Net --dtypes int4",
        env={**os.environ, "PYTHONPATH": root, "COLUMNS": "100", "TERM": "xterm"},
        cwd=str(here),
        encoding="utf-8",
        timeout=240,
    )
    assert "training with Adam" in shown
    assert "│" in shown


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB"),
        (3 << 29, "1.50 GiB"),
        (1 << 55, "32768.00 TiB"),
    ],
)
def test_sizes_as_people_read_them(number: int, text: str) -> None:
    assert size_text(number) == text
