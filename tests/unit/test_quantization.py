"""Quantized models: which layers become bitsandbytes', what they compute, and where weights come from."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from pathlib import Path
from typing import Any

import accelerate.utils as theirs
import pytest
import safetensors.torch
import torch
from torch import nn

from notebook_accel import dispatch_model, load_checkpoint_in_model, probes
from notebook_accel.accelerator import Accelerator
from notebook_accel.big_modeling import eight_bit
from notebook_accel.errors import CheckpointError
from notebook_accel.utils import BnbQuantizationConfig, load_and_quantize_model, modeling

pytestmark = pytest.mark.usefixtures("clean_runtime")


class Model(nn.Module):
    """An embedding, blocks, and an output layer."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 64)
        self.blocks = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64, bias=False)])
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        out: torch.Tensor = self.head(self.norm(x))
        return out


TOKENS = torch.arange(10).reshape(2, 5)
EIGHT: dict[str, Any] = {"load_in_8bit": True, "torch_dtype": torch.float32}
FOUR: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "fp32"}


def kinds(model: Any) -> list[str]:
    return [type(part).__name__ for part in (*model.blocks, model.head)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("options", "kind", "dtype", "near"),
    [
        (EIGHT, "Linear8bitLt", torch.int8, 0.01),
        (FOUR, "Linear4bit", torch.uint8, 0.1),
        ({**FOUR, "bnb_4bit_use_double_quant": True}, "Linear4bit", torch.uint8, 0.1),
    ],
)
def test_layers_become_small_and_compute_nearly_the_same(
    options: dict[str, Any], kind: str, dtype: torch.dtype, near: float, tied: bool
) -> None:
    pytest.importorskip("bitsandbytes")
    wanted = Model(tied)(TOKENS)
    model: Any = load_and_quantize_model(
        Model(tied).eval(), BnbQuantizationConfig(**options), device_map={"": "cpu"}
    )
    assert kinds(model) == [kind, kind, "Linear"] and not model.training
    assert {block.weight.dtype for block in model.blocks} == {dtype}
    assert not any(block.weight.requires_grad for block in model.blocks)
    assert (model.head.weight is model.embed.weight) is tied
    assert 0 < (model(TOKENS) - wanted).norm() / wanted.norm() < near
    assert (model.is_loaded_in_8bit, model.is_loaded_in_4bit) == (
        kind == "Linear8bitLt",
        kind == "Linear4bit",
    )
    assert Accelerator(cpu=True).prepare_model(model, evaluation_mode=True)(TOKENS).shape == (2, 5, 11)


def test_what_is_left_out_and_its_dtype() -> None:
    pytest.importorskip("bitsandbytes")
    config = BnbQuantizationConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype="bf16",
        skip_modules=["blocks.0"],
        keep_in_fp32_modules=["norm", "blocks.1"],
    )
    model: Any = load_and_quantize_model(Model(), config)
    assert kinds(model) == ["Linear", "Linear", "Linear4bit"]
    kept = (model.embed, model.blocks[0], model.blocks[1], model.norm)
    assert [part.weight.dtype for part in kept] == [
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
        torch.float32,
    ]
    everything = BnbQuantizationConfig(load_in_8bit=True, skip_modules=["blocks", "head"])
    with pytest.raises(
        ValueError, match=r"Model has no linear layer to quantize besides \['blocks', 'head'\]"
    ):
        load_and_quantize_model(Model(), everything)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_weights_come_from_files(tmp_path: Path, device: str) -> None:
    pytest.importorskip("bitsandbytes")
    config = BnbQuantizationConfig(**FOUR)
    wanted = load_and_quantize_model(Model(), config)(TOKENS)
    Accelerator(cpu=True).save_model(Model(), tmp_path)
    other = Model().to(device)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    torch.testing.assert_close(load_and_quantize_model(other, config, tmp_path)(TOKENS), wanted)


SPREAD = {"embed": "cpu", "blocks.0": "disk", "blocks.1": "cpu", "norm": "disk", "head": "cpu"}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("device_map", [SPREAD, {"": "disk"}, "auto"])
@pytest.mark.parametrize("threshold", [6.0, 0.5, 0.0])
def test_weights_stay_on_the_disk_in_8_bits(
    tmp_path: Path, threshold: float, device_map: Any, training: bool
) -> None:
    pytest.importorskip("bitsandbytes")
    config = BnbQuantizationConfig(**EIGHT, llm_int8_threshold=threshold)
    source, folder = tmp_path / "weights", tmp_path / "offloaded"
    Accelerator(cpu=True).save_model(Model(), source)
    whole = load_and_quantize_model(Model().to("meta"), config, source, {"": "cpu"}).train(training)
    model: Any = load_and_quantize_model(
        Model().to("meta").train(training), config, source, device_map, offload_folder=folder
    )
    assert (model.is_loaded_in_8bit, model.is_loaded_in_4bit, model.training) == (True, False, training)
    for _ in range(2):
        assert torch.equal(model(TOKENS), whole(TOKENS))
        assert {block.weight.dtype for block in model.blocks} == {torch.int8}
    first = model.blocks[0]
    assert first.weight.is_meta is first.SCB.is_meta is (device_map != "auto")
    if device_map != "auto":
        assert (folder / "blocks.0.weight.dat").stat().st_size == first.weight.numel()
        assert (folder / "blocks.0.SCB.dat").stat().st_size == 4 * first.out_features
    assert list(model.blocks.state_dict()) == ["0.weight", "0.SCB", "0.bias", "1.weight", "1.SCB"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("device_map", [{"": "disk"}, SPREAD])
@pytest.mark.parametrize("kind", ["safetensors", "torch.save", "quantized", "quantized, torch.save"])
def test_files_of_every_kind_are_offloaded_in_8_bits(
    tmp_path: Path, kind: str, device_map: Any, dtype: torch.dtype, recwarn: pytest.WarningsRecorder
) -> None:
    """One that holds 8-bit weights already is read as it is, and its scales stay in float32."""
    pytest.importorskip("bitsandbytes")
    config = BnbQuantizationConfig(load_in_8bit=True, torch_dtype=dtype)
    whole = load_and_quantize_model(Model(), config)
    wanted = whole(TOKENS)
    state = Model().state_dict()
    if "quantized" in kind:
        state = whole.state_dict()
        assert "blocks.0.weight_format" in state
    file = tmp_path / ("pytorch_model.bin" if "torch.save" in kind else "model.safetensors")
    torch.save(state, file) if "torch.save" in kind else safetensors.torch.save_file(state, file)
    model: Any = load_and_quantize_model(
        Model().to("meta"), config, file, device_map, offload_folder=tmp_path / "offloaded"
    )
    assert torch.equal(model(TOKENS), wanted)
    kept = modeling.get_state_dict_offloaded_model(model)
    assert {kept[f"blocks.{number}.SCB"].dtype for number in range(2)} == {torch.float32}
    assert model.blocks[0].SCB.dtype == torch.float32
    assert not [found for found in recwarn if "does not use" in str(found.message)]


def make_empty_8bit(model: Any) -> Any:
    """Return the model with 8-bit layers of bitsandbytes without values."""
    layers = pytest.importorskip("bitsandbytes").nn
    for number, old in enumerate(model.blocks):
        has_bias = old.bias is not None
        made = layers.Linear8bitLt(64, 64, has_bias, has_fp16_weights=False, threshold=6.0, device="meta")
        model.blocks[number] = made
    return model.to("meta").eval()


class Kept(nn.Module):
    """A module with a state beside its tensors."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.ones(1)

    def set_extra_state(self, state: torch.Tensor) -> None:
        assert state == 1


def test_a_saved_8_bit_model_fits_and_only_its_layers_have_a_format(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    config = BnbQuantizationConfig(**EIGHT)
    whole = load_and_quantize_model(Model(), config).eval()
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file(whole.state_dict(), file)
    model = make_empty_8bit(Model())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        load_checkpoint_in_model(model, file, {"": "cpu"}, strict=True, offload_8bit_bnb=True)
        assert torch.equal(model(TOKENS), whole(TOKENS))
        load_checkpoint_in_model(model, file, dtype="float16")  # it has values now
        load_checkpoint_in_model(model, file, strict=True)
        model.norm.register_module("kept", Kept())  # such a model loads by its own code
        state = {**whole.state_dict(), "norm.kept._extra_state": torch.ones(1)}
        safetensors.torch.save_file(state, file)
        load_checkpoint_in_model(model, file, strict=True)
        del model.norm.kept
    assert model.blocks[0].SCB.dtype == torch.float32 and model.norm.weight.dtype == torch.float16
    safetensors.torch.save_file({**whole.state_dict(), "norm.weight_format": torch.zeros(())}, file)
    with pytest.raises(CheckpointError, match=r"weights that the model does not know: 'norm.weight_format'$"):
        load_checkpoint_in_model(
            make_empty_8bit(Model()), file, {"": "cpu"}, strict=True, offload_8bit_bnb=True
        )


def test_a_call_that_failed_can_be_repeated(tmp_path: Path) -> None:
    """The layers are the old ones again, and nothing has values."""
    pytest.importorskip("bitsandbytes")
    config = BnbQuantizationConfig(**EIGHT)
    Accelerator(cpu=True).save_model(Model(), tmp_path / "weights")
    model: Any = Model().to("meta")
    before = list(model.modules())
    with pytest.raises(ValueError, match=r"stays on the disk, .* give an offload_folder"):
        load_and_quantize_model(model, config, tmp_path / "weights", SPREAD)
    assert list(model.modules()) == before and all(value.is_meta for value in model.state_dict().values())
    folder = tmp_path / "offloaded"
    load_and_quantize_model(model, config, tmp_path / "weights", SPREAD, offload_folder=folder)
    assert torch.equal(model(TOKENS), load_and_quantize_model(Model(), config)(TOKENS))
    model = make_empty_8bit(Model())
    before = list(model.modules())
    with pytest.raises(ValueError, match=r"stays on the disk, .* give an offload_folder"):
        load_checkpoint_in_model(model, tmp_path / "weights", SPREAD, offload_8bit_bnb=True)
    assert list(model.modules()) == before
    model = Model()
    with pytest.raises(ValueError, match="puts '' on 'cuda:99', and torch finds"):
        load_and_quantize_model(model, config, device_map={"": "cuda:99"})
    assert kinds(model) == ["Linear", "Linear", "Linear"]


def test_damage_in_a_weight_to_quantize_changes_nothing(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    Accelerator(cpu=True).save_model(Model(), tmp_path)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    place = content.index(Model().blocks[1].weight.detach().numpy().tobytes()) + 1000
    file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    model = make_empty_8bit(Model())
    model.embed = Model().embed  # with values to read into
    with torch.no_grad():
        model.embed.weight.zero_()
    with pytest.raises(CheckpointError, match=r"blocks.1.weight"):
        load_checkpoint_in_model(model, tmp_path, {"": "cpu"}, offload_8bit_bnb=True)
    assert model.norm.weight.is_meta and not model.embed.weight.any()
    places = {"embed": "cpu", "blocks.0": "disk", "blocks.1": "cpu", "norm": "cpu", "head": "cpu"}
    with pytest.raises(CheckpointError, match=r"blocks.1.weight"):
        load_checkpoint_in_model(model, tmp_path, places, tmp_path / "offloaded", offload_8bit_bnb=True)
    assert not (tmp_path / "offloaded").exists()


class Shared(Model):
    """A layer has two names, of which the second may be one to leave out; so has the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.again, self.out = self.blocks[1], self.head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = super().forward(tokens) + self.again(torch.ones(1, 64)).sum()
        return made


@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"": "disk"}])
def test_a_shared_layer_is_replaced_under_all_its_names(tmp_path: Path, device_map: Any) -> None:
    pytest.importorskip("bitsandbytes")
    config = BnbQuantizationConfig(**EIGHT)
    Accelerator(cpu=True).save_model(Shared(), tmp_path / "weights")
    model: Any = load_and_quantize_model(
        Shared().to("meta").eval(), config, tmp_path / "weights", device_map, offload_folder=tmp_path / "off"
    )
    assert model.again is model.blocks[1] and "8bit" in type(model.again).__name__
    assert model.out is model.head and type(model.head) is nn.Linear
    assert torch.equal(model(TOKENS), load_and_quantize_model(Shared().eval(), config)(TOKENS))
    left = BnbQuantizationConfig(**EIGHT, skip_modules=["again", "out"])
    assert kinds(load_and_quantize_model(Shared(), left)) == ["Linear8bitLt", "Linear", "Linear"]
    kept = BnbQuantizationConfig(load_in_8bit=True, keep_in_fp32_modules=["again"])
    quantized: Any = load_and_quantize_model(Shared(), kept)
    assert quantized.blocks[1].weight.dtype == torch.float32 and quantized.norm.weight.dtype == torch.float16


def test_shared_layers_of_bitsandbytes_are_replaced_under_all_their_names(tmp_path: Path) -> None:
    model = make_empty_8bit(Model())
    model.again, model.out = model.blocks[1], model.head
    Accelerator(cpu=True).save_model(Shared(), tmp_path)
    load_checkpoint_in_model(model, tmp_path, {"": "cpu"}, strict=True, offload_8bit_bnb=True)
    assert model.again is model.blocks[1] and isinstance(model.again, eight_bit.Linear8bit)
    assert model.again.weight.device.type == "cpu"


@pytest.mark.parametrize("is_safe", [True, False])
def test_a_default_device_does_not_matter(tmp_path: Path, is_safe: bool) -> None:
    pytest.importorskip("bitsandbytes")
    config = BnbQuantizationConfig(**EIGHT)
    Accelerator(cpu=True).save_model(Model(), tmp_path / "weights", safe_serialization=is_safe)
    model: Any = Model().to("meta")
    with torch.device("meta"):
        load_and_quantize_model(model, config, tmp_path / "weights", SPREAD, offload_folder=tmp_path / "off")
    assert torch.equal(model(TOKENS), load_and_quantize_model(Model(), config)(TOKENS))


def test_one_weight_at_a_time_is_not_in_8_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bitsandbytes")
    Accelerator(cpu=True).save_model(Model(), tmp_path / "weights")
    before: list[Any] = []

    def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert not any(earlier() is not None for earlier in before)
        before.append(weakref.ref(weight))
        return real(weight)

    real = eight_bit.quantize
    monkeypatch.setattr(eight_bit, "quantize", quantize)
    config = BnbQuantizationConfig(**EIGHT)
    folder = tmp_path / "offloaded"
    load_and_quantize_model(Model().to("meta"), config, tmp_path / "weights", SPREAD, offload_folder=folder)
    assert len(before) == 2


def test_layers_of_bitsandbytes_are_offloaded_in_8_bits(tmp_path: Path) -> None:
    layers = pytest.importorskip("bitsandbytes").nn
    Accelerator(cpu=True).save_model(Model(), tmp_path / "weights")
    model: Any = Model().to("meta").eval()
    made = layers.Linear8bitLt(64, 64, has_fp16_weights=False, threshold=6.0, device="meta")
    model.blocks[0] = made.eval()
    folder = tmp_path / "offloaded"
    load_checkpoint_in_model(
        model, tmp_path / "weights", SPREAD, folder, dtype=torch.float32, offload_8bit_bnb=True
    )
    dispatch_model(model, SPREAD, offload_dir=folder)
    assert (folder / "blocks.0.weight.dat").stat().st_size == 64 * 64
    config = BnbQuantizationConfig(**EIGHT, skip_modules=["blocks.1", "head"])
    assert torch.equal(model(TOKENS), load_and_quantize_model(Model().eval(), config)(TOKENS))
    with pytest.raises(ValueError, match="Model has no 8-bit layer of bitsandbytes on the meta device"):
        load_checkpoint_in_model(Model(), tmp_path / "weights", offload_8bit_bnb=True)


def test_missing_values_are_named(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    config = BnbQuantizationConfig(**FOUR)
    with pytest.raises(ValueError, match=r"no values: embed\.weight, .*weights_location"):
        load_and_quantize_model(Model().to("meta"), config)
    Accelerator(cpu=True).save_model(Model().blocks, tmp_path)
    with pytest.raises(CheckpointError, match="embed"):
        load_and_quantize_model(Model().to("meta"), config, tmp_path)
    model = Model()
    model.register_buffer("scale", torch.ones(1, device="meta"), persistent=False)
    with pytest.raises(ValueError, match=r"no values: scale; .*not persistent"):
        load_and_quantize_model(model, config, tmp_path)


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bitsandbytes")
    config = BnbQuantizationConfig(**FOUR)
    spread = {"embed": "cpu", "blocks": "disk", "norm": "cpu", "head": "cpu"}
    with pytest.raises(NotImplementedError, match=r"^load_in_4bit=True: layers of 4 bits are on one device"):
        load_and_quantize_model(Model().to("meta"), config, tmp_path, device_map=spread)
    eight = BnbQuantizationConfig(**EIGHT, keep_in_fp32_modules=["norm"])
    with pytest.raises(NotImplementedError, match=r"^keep_in_fp32_modules with torch_dtype=torch.float32"):
        load_and_quantize_model(Model().to("meta"), eight, tmp_path, device_map=spread)
    eight = BnbQuantizationConfig(**EIGHT)
    with pytest.raises(ValueError, match=r"needs weights_location, .*; blocks.0 has values"):
        load_and_quantize_model(Model(), eight, tmp_path, device_map=spread)
    with pytest.raises(ValueError, match=r"needs weights_location, .*init_empty_weights\(\)$"):
        load_and_quantize_model(Model().to("meta"), eight, device_map=spread)
    Accelerator(cpu=True).save_model(Model(), tmp_path)
    with pytest.raises(ValueError, match=r"'blocks.0.weight' stays on the disk, .* give an offload_folder"):
        load_and_quantize_model(Model().to("meta"), eight, tmp_path, device_map=spread)
    monkeypatch.setattr(probes, "is_available", lambda name: name != "bitsandbytes")
    with pytest.raises(ImportError, match="pip install bitsandbytes"):
        load_and_quantize_model(Model(), config)


@pytest.mark.parametrize(
    "options",
    [
        {"load_in_8bit": True},
        {"load_in_4bit": True},
        {"load_in_4bit": True, "bnb_4bit_compute_dtype": "bf16"},
        {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32, "torch_dtype": torch.bfloat16},
        {
            "load_in_8bit": True,
            "skip_modules": ["a"],
            "keep_in_fp32_modules": ["b"],
            "llm_int8_threshold": 5.0,
        },
    ],
)
def test_the_config_is_accelerates(options: dict[str, Any]) -> None:
    ours, other = BnbQuantizationConfig(**options), theirs.BnbQuantizationConfig(**options)
    assert dataclasses.asdict(ours) == dataclasses.asdict(other)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "one of them is to be True"),
        ({"load_in_4bit": True, "load_in_8bit": True}, "one of them is to be True"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, "'int4' is unknown, choose fp4 or nf4"),
        (
            {"load_in_4bit": True, "bnb_4bit_compute_dtype": "fp8"},
            "'fp8' is unknown, choose fp32, fp16, bf16",
        ),
        ({"load_in_8bit": True, "torch_dtype": "half"}, "torch_dtype 'half' is unknown"),
    ],
)
def test_a_wrong_config_says_what_is_legal(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        BnbQuantizationConfig(**options)
