"""Checkpoints with the names of the hub, loaded into models of Transformers as its `from_pretrained` does."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from notebook_accel import (
    CheckpointError,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from notebook_accel.checkpointing.models import Source
from tests.structure.source import ROOT

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MIXTRAL = {**SIZES, "num_local_experts": 11, "num_experts_per_tok": 2}  # 10 comes after 9
CONFIGS: dict[str, Any] = {
    "mixtral": lambda: transformers.MixtralConfig(**MIXTRAL),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **SIZES,
        num_experts=4,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
        decoder_sparse_step=1,
    ),
    "olmoe": lambda: transformers.OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2),
    "tied": lambda: transformers.MixtralConfig(**MIXTRAL, tie_word_embeddings=True),
}
WORDS = torch.tensor([[1, 5, 6, 7], [1, 8, 9, 4]])


def make(kind: str) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]()).eval()


def make_empty(kind: str) -> Any:
    with init_empty_weights():
        return make(kind)


def save(model: Any, folder: Path, size: str = "12KB") -> Path:
    """Save a model with the hub's names; an expert's weights may be in other files than those of the next one."""
    model.save_pretrained(folder, max_shard_size=size)
    return folder


def same(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_as_from_pretrained(tmp_path: Path, kind: str, dtype: torch.dtype | None) -> None:
    folder = save(make(kind), tmp_path / "m")
    stored = {name for file in folder.glob("*.safetensors") for name in load_file(file)}
    assert any(".experts.1." in name for name in stored), "the experts are separate in the files"
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or torch.float32)
    whole = make(kind)
    load_checkpoint_in_model(whole, folder, dtype=dtype)
    assert same(whole.state_dict(), expected.state_dict())
    model = load_checkpoint_and_dispatch(make_empty(kind), folder, device_map={"": "cpu"}, dtype=dtype)
    assert same(model.state_dict(), expected.state_dict())
    with torch.no_grad():
        assert torch.equal(model(WORDS).logits, expected(WORDS).logits)


def make_llava() -> Any:
    vision = transformers.CLIPVisionConfig(**{**PICTURES, "intermediate_size": 24})
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**SIZES), vision_config=vision, image_token_index=3
    )
    return transformers.LlavaForConditionalGeneration(config)


PICTURES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
}
OTHERS: dict[str, Any] = {
    "parts with other prefixes": make_llava,
    "weights that are cut": lambda: transformers.Dinov2ForImageClassification(
        transformers.Dinov2Config(**PICTURES)
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_conversions(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    original = OTHERS[kind]()
    folder = save(original, tmp_path / "m")
    stored = {name for file in folder.glob("*.safetensors") for name in load_file(file)}
    if stored == original.state_dict().keys():
        pytest.skip("this version of Transformers writes these weights under their names in the model")
    with init_empty_weights():
        model = OTHERS[kind]()
    load_checkpoint_and_dispatch(model, folder, device_map={"": "cpu"}, strict=True)
    assert same(model.state_dict(), original.state_dict())


@pytest.mark.parametrize("places", ["disk", "layers", "auto"])
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_weights_of_the_disk(tmp_path: Path, places: str, form: str) -> None:
    original = make("mixtral")
    folder = save(original, tmp_path / "m")
    if form == "bin":
        state = {
            name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()
        }
        folder = tmp_path / "weights.bin"
        torch.save(state, folder)
    first = {
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.embed_tokens": "disk",
        "model.norm": "cpu",
    }
    device_map: Any = {
        "disk": {"": "disk"},
        "layers": {**first, "model.rotary_emb": "cpu", "lm_head": "cpu"},
        "auto": "auto",
    }[places]
    model = load_checkpoint_and_dispatch(
        make_empty("mixtral"),
        folder,
        device_map=device_map,
        max_memory={"cpu": "60KB"} if places == "auto" else None,
        no_split_module_classes=["MixtralDecoderLayer"],
        offload_folder=tmp_path / "off",
    )
    written = {path.name for path in (tmp_path / "off").glob("*.dat")}
    assert "model.layers.1.mlp.experts.gate_up_proj.dat" in written
    if form == "safetensors":
        assert not any("self_attn" in name for name in written), (
            "what has another name only is read where it is"
        )
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(WORDS).logits, original(WORDS).logits)


@pytest.mark.parametrize("kind", [*CONFIGS, *OTHERS])
@pytest.mark.parametrize("places", ["memory", "disk", "in place"])
def test_a_model_is_saved_with_the_names_of_its_files(tmp_path: Path, kind: str, places: str) -> None:
    original = OTHERS[kind]() if kind in OTHERS else make(kind)
    folder = save(original, tmp_path / "m")
    expected = type(original).from_pretrained(folder)
    with init_empty_weights():
        model = OTHERS[kind]() if kind in OTHERS else make(kind)
    if places == "in place":
        model = OTHERS[kind]() if kind in OTHERS else make(kind)
        load_checkpoint_in_model(model, folder)
    else:
        device_map = {"": "disk" if places == "disk" else "cpu"}
        load_checkpoint_and_dispatch(model, folder, device_map=device_map, offload_folder=tmp_path / "off")
    assert [repr(one) for one in model._weight_conversions] == [
        repr(one) for one in expected._weight_conversions
    ]
    if places == "disk":
        return
    ours, theirs = save(model, tmp_path / "ours", "1GB"), save(expected, tmp_path / "theirs", "1GB")
    assert same(load_file(ours / "model.safetensors"), load_file(theirs / "model.safetensors"))


def test_the_names_of_the_last_files_are_those_that_are_saved(tmp_path: Path) -> None:
    """Also where these are the names of the model."""
    original = make("mixtral")
    files = save(original, tmp_path / "m")
    fitting = tmp_path / "fitting"
    original.config.save_pretrained(fitting)
    save_file(original.state_dict(), fitting / "model.safetensors", metadata={"format": "pt"})
    expected = type(original).from_pretrained(fitting)
    assert "_weight_conversions" in vars(expected)
    model = make("mixtral")
    for folder in (fitting, files, fitting):
        load_checkpoint_in_model(model, folder)
        assert bool(model._weight_conversions) == (folder == files)
    ours, theirs = save(model, tmp_path / "ours", "1GB"), save(expected, tmp_path / "theirs", "1GB")
    saved = load_file(ours / "model.safetensors")
    assert same(saved, load_file(theirs / "model.safetensors")) and same(saved, original.state_dict())


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_what_makes_several_weights_is_read_once(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a weight in the file that is cut into several of the model, all of which go to the disk."""
    config = transformers.Dinov2Config(**PICTURES, use_swiglu_ffn=True)
    original = transformers.Dinov2ForImageClassification(config).eval()
    folder = save(original, tmp_path / "m", "1GB")
    stored = load_file(folder / "model.safetensors")
    if stored.keys() == original.state_dict().keys():
        pytest.skip("this version of Transformers writes these weights as the model has them")
    assert sum("weights_in" in name for name in stored) == 4, "two for each layer"
    if form == "bin":
        folder = tmp_path / "weights.bin"
        torch.save(stored, folder)
    read: list[str] = []
    read_entry = Source.read_entry

    def note(source: Source, name: str) -> Any:
        read.append(name)
        return read_entry(source, name)

    monkeypatch.setattr(Source, "read_entry", note)
    with init_empty_weights():
        model = transformers.Dinov2ForImageClassification(config).eval()
    load_checkpoint_and_dispatch(model, folder, device_map={"": "disk"}, offload_folder=tmp_path / "off")
    assert sum("weights_in" in name for name in read) == 4
    assert len(read) == len(set(read)), read
    picture = torch.rand(1, 3, 8, 8)
    with torch.no_grad():
        assert torch.equal(model(picture).logits, original(picture).logits)


def test_without_a_folder_nothing_changes(tmp_path: Path) -> None:
    folder = save(make("mixtral"), tmp_path / "m")
    model = make_empty("mixtral")
    with pytest.raises(ValueError, match="give an offload_folder"):
        load_checkpoint_and_dispatch(model, folder, device_map={"": "disk"})
    assert all(value.is_meta for value in model.parameters())


def test_the_names_of_the_model_are_loaded_as_they_are(tmp_path: Path) -> None:
    original = make("mixtral")
    save_file(original.state_dict(), tmp_path / "m.safetensors")
    model = make("mixtral")
    with torch.no_grad():
        model.lm_head.weight.zero_()
    load_checkpoint_in_model(model, tmp_path / "m.safetensors", strict=True)
    assert same(model.state_dict(), original.state_dict())


def test_a_checkpoint_of_the_inner_model(tmp_path: Path) -> None:
    """`from_pretrained` adds and removes the prefix too."""
    original = make("mixtral")
    inner = save(original.model, tmp_path / "inner")
    outer = save(original, tmp_path / "outer")
    model = make("mixtral")
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    load_checkpoint_in_model(model, inner)
    assert same(model.model.state_dict(), original.model.state_dict())
    with init_empty_weights():
        empty = transformers.MixtralModel(CONFIGS["mixtral"]())
    with pytest.warns(UserWarning, match=r"does not use: \['lm_head.weight'\]"):
        loaded = load_checkpoint_and_dispatch(empty, outer, device_map={"": "cpu"})
    assert same(loaded.state_dict(), original.model.state_dict())


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    folder = save(make("mixtral"), tmp_path / "m", "1GB")
    state = load_file(folder / "model.safetensors")
    gone = next(name for name in state if ".1." in name and "experts.10.w2" in name)
    del state[gone]
    save_file(state, folder / "model.safetensors")
    model = make_empty("mixtral")
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.mlp\.experts\.down_proj.*\[10, 16, 24\].*\[11, 16, 24\]"
    ):
        load_checkpoint_and_dispatch(model, folder, device_map={"": "cpu"})
    assert all(value.is_meta for value in model.parameters())
    del state[gone.replace("w2", "w1")]
    save_file(state, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"cannot make 'model\.layers\.1\.mlp\.experts\.gate_up_proj'"):
        load_checkpoint_and_dispatch(model, folder, device_map={"": "cpu"})


def test_of_two_names_for_a_weight_the_first_counts(tmp_path: Path) -> None:
    original = make("mixtral")
    folder = save(original, tmp_path / "m", "1GB")
    state = load_file(folder / "model.safetensors")
    save_file({**state, "norm.weight": state["model.norm.weight"] + 4}, folder / "model.safetensors")
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model = load_checkpoint_and_dispatch(make_empty("mixtral"), folder, device_map={"": "cpu"})
    assert same(model.state_dict(), expected.state_dict())


def test_what_transformers_raises_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(make("mixtral"), tmp_path / "m")

    def fail(model: Any) -> None:
        raise AttributeError("of Transformers")

    mapping = importlib.import_module("transformers.conversion_mapping")
    monkeypatch.setattr(mapping, "get_model_conversion_mapping", fail)
    with pytest.raises(AttributeError, match="of Transformers"):
        load_checkpoint_in_model(make("mixtral"), folder)


def test_other_models_import_nothing(tmp_path: Path) -> None:
    save_file({"other": torch.ones(2)}, tmp_path / "m.safetensors")
    code = (
        "import sys, warnings, torch, notebook_accel as n\n"
        "warnings.simplefilter('ignore')\n"
        f"n.load_checkpoint_in_model(torch.nn.Linear(1, 1), {str(tmp_path / 'm.safetensors')!r})\n"
        "assert 'transformers' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    model = nn.Linear(1, 1)
    with pytest.warns(UserWarning, match="does not use"):
        load_checkpoint_in_model(model, tmp_path / "m.safetensors")


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_peak(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(
        **{
            **MIXTRAL,
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_hidden_layers": 8,
            "num_local_experts": 8,
        }
    )
    torch.manual_seed(0)
    save(transformers.MixtralForCausalLM(config), tmp_path / "m", "20MB")
    config.save_pretrained(tmp_path / "config")
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.big_modeling.converting"]
    done = subprocess.run(
        [*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    layer = 8 * 3 * 256 * 1024 * 4
    # what is made, and what it is made of; all layers are 8 times as much
    assert found["disk"] < 2.5 * layer, (found, layer)
    assert found["cpu"] < 9.5 * layer, (found, layer)
