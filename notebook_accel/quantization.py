"""Models whose linear layers hold 8 or 4 bits a weight, by bitsandbytes: for inference, or under trained adapters."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from . import detect, probes
from .big_modeling.device_map import check_devices_exist
from .big_modeling.dispatch import dispatch_model, make_device_map
from .big_modeling.eight_bit import Linear8bit, list_names, swap_layers
from .big_modeling.load import load_checkpoint_in_model
from .checked import Checked
from .checkpointing.folder import PathLike
from .hooks import tensors

_DTYPES: Final = {
    name: dtype
    for dtype, names in {
        torch.float32: ("fp32", "float32"),
        torch.float16: ("fp16", "float16"),
        torch.bfloat16: ("bf16", "bfloat16"),
    }.items()
    for name in names
}
_FORMATS: Final = ("fp4", "nf4")


@dataclass
class BnbQuantizationConfig(Checked):
    """How `load_and_quantize_model` quantizes; either `load_in_8bit` or `load_in_4bit` has to be True.

    Attributes:
        load_in_8bit: 8 bits per weight, by LLM.int8() (Dettmers, Lewis, Belkada, Zettlemoyer 2022, arXiv:2208.07339).
        llm_int8_threshold: input columns with a larger value are multiplied in full precision.
        load_in_4bit: 4 bits per weight, by QLoRA (Dettmers, Pagnoni, Holtzman, Zettlemoyer 2023, arXiv:2305.14314).
        bnb_4bit_quant_type: `fp4` or `nf4`.
        bnb_4bit_use_double_quant: quantize the scales of the 4-bit blocks too.
        bnb_4bit_compute_dtype: dtype in which 4-bit layers compute: `fp32`, `fp16`, `bf16` or a dtype of torch.
        torch_dtype: dtype of all other weights; by default `bnb_4bit_compute_dtype` with 4 bits, float16 with 8.
        skip_modules: names of modules that are not quantized, with all inside; by default the last linear layer and
            those that share their weights with another module.
        keep_in_fp32_modules: names of modules that are not quantized and stay in float32.

    Raises:
        ValueError: a value is unknown, or both or neither number of bits is chosen.
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: str | torch.dtype = "fp16"
    torch_dtype: str | torch.dtype | None = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None

    def _prepare_check(self, name: str, before: Any) -> None:
        if name == "load_in_8bit" and self.load_in_8bit:
            self.load_in_4bit = False
        elif name == "load_in_4bit" and self.load_in_4bit:
            self.load_in_8bit = False

    def _complete_fields(self) -> None:
        if self.load_in_8bit == self.load_in_4bit:
            raise ValueError(
                f"load_in_8bit={self.load_in_8bit} and load_in_4bit={self.load_in_4bit}: one of them is to be True"
            )
        if self.bnb_4bit_quant_type not in _FORMATS:
            raise ValueError(
                f"bnb_4bit_quant_type {self.bnb_4bit_quant_type!r} is unknown, choose {' or '.join(_FORMATS)}"
            )
        self.bnb_4bit_compute_dtype = _dtype("bnb_4bit_compute_dtype", self.bnb_4bit_compute_dtype)
        usual = self.bnb_4bit_compute_dtype if self.load_in_4bit else torch.float16
        self.torch_dtype = usual if self.torch_dtype is None else _dtype("torch_dtype", self.torch_dtype)


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    weights_location: PathLike | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    max_memory: Mapping[Any, Any] | None = None,
    offload_folder: PathLike | None = None,
    offload_state_dict: bool = False,
) -> nn.Module:
    """Replace the linear layers of a model by quantized layers, and move the model to the device.

    Args:
        model: has weights, or has parameters on the meta device and `weights_location` has all of them.
        bnb_quantization_config: how to quantize.
        weights_location: checkpoint to load first, see `load_checkpoint_in_model`.
        device_map: `{"": device}` for a device; by default that of this process. With 8 bits also a device for each
            part, of which `disk` is one, or how to make such a map: see `load_checkpoint_and_dispatch`. Weights are
            then quantized while they are read, and are offloaded in int8.
        no_split_module_classes: for a map that is made, see `infer_auto_device_map`.
        max_memory: for a map that is made, see `infer_auto_device_map`.
        offload_folder: gets the weights of `disk`.
        offload_state_dict: accepted and not needed: only weights that stay in memory take memory.

    Returns:
        The model, changed in place.

    Raises:
        ImportError: bitsandbytes is not installed.
        ValueError: tensors have no values, or there is no layer to quantize.
        CheckpointError: the weights are damaged or do not fit.
        NotImplementedError: layers of 4 bits are to be on several devices.
    """
    if not probes.is_available("bitsandbytes"):
        raise ImportError(
            "quantized layers are bitsandbytes', which is not installed: pip install bitsandbytes"
        )
    config = bnb_quantization_config
    if isinstance(device_map, str) or (device_map is not None and _is_spread(device_map)):
        checkpoint = _check_spread(model, config, weights_location)
        layers = _require_layers(model, config)
        with swap_layers(model, {layer: _empty_8bit(layer, config) for layer in layers}):
            dtype: Any = config.torch_dtype
            chosen = make_device_map(model, device_map, max_memory, no_split_module_classes, dtype)
            load_checkpoint_in_model(
                model,
                checkpoint,
                chosen,
                offload_folder=offload_folder,
                dtype=dtype,
                keep_in_fp32_modules=config.keep_in_fp32_modules,
            )
            return _mark(dispatch_model(model, chosen, offload_dir=offload_folder), config)
    check_devices_exist(device_map or {})
    device = tensors.as_device(device_map[""]) if device_map else detect.ensure().device
    _fill(model, weights_location)
    # without the old layers: each gives its memory back when bitsandbytes has quantized it
    quantized = [(names, _quantize(layer, config)) for layer, names in _require_layers(model, config).items()]
    for names, _ in quantized:
        for name in names:
            model.set_submodule(name, nn.Identity())
    _cast(model, config)
    for names, layer in quantized:
        for name in names:
            model.set_submodule(name, layer)
    return _mark(model.to(device), config)


def _mark(model: nn.Module, config: BnbQuantizationConfig) -> nn.Module:
    bits: Any = model
    bits.is_loaded_in_8bit, bits.is_loaded_in_4bit = config.load_in_8bit, config.load_in_4bit
    return model


def _dtype(argument: str, value: str | torch.dtype) -> torch.dtype:
    found = value if isinstance(value, torch.dtype) else _DTYPES.get(value)
    if found is None:
        raise ValueError(f"{argument} {value!r} is unknown, choose fp32, fp16, bf16 or a dtype of torch")
    return found


def _is_spread(device_map: Mapping[str, Any]) -> bool:
    """Return True for several devices, or the disk."""
    return set(device_map) != {""} or device_map[""] == "disk"


def _check_spread(
    model: nn.Module, config: BnbQuantizationConfig, weights_location: PathLike | None
) -> PathLike:
    """Return the checkpoint of a model that can be loaded onto several devices.

    Raises:
        NotImplementedError: its layers get 4 bits, or it needs a cast that loading does not do.
        ValueError: it has values already, or there is no checkpoint.
    """
    if config.load_in_4bit:
        raise NotImplementedError(
            "load_in_4bit=True: layers of 4 bits are on one device, that of the process or the one in "
            "device_map={'': device}; those of 8 bits can be on several and on the disk"
        )
    if config.keep_in_fp32_modules and config.torch_dtype != torch.float16:
        raise NotImplementedError(
            f"keep_in_fp32_modules with torch_dtype={config.torch_dtype} is for one device: leave one out"
        )
    loaded = [names[0] for layer, names in _find_layers(model, config).items() if not layer.weight.is_meta]
    if weights_location is None or loaded:
        raise ValueError(
            "a device_map for several devices needs weights_location, and a model without values: build it under "
            f"init_empty_weights(){f'; {loaded[0]} has values' if loaded else ''}"
        )
    return weights_location


def _require_layers(model: nn.Module, config: BnbQuantizationConfig) -> dict[nn.Linear, list[str]]:
    layers = _find_layers(model, config)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no linear layer to quantize besides {_find_skipped(model, config)}"
        )
    return layers


def _empty_8bit(layer: nn.Linear, config: BnbQuantizationConfig) -> Linear8bit:
    dtype: Any = None if layer.bias is None else config.torch_dtype
    made = Linear8bit(layer.in_features, layer.out_features, dtype, config.llm_int8_threshold)
    return made.train(layer.training)


def _fill(model: nn.Module, weights_location: PathLike | None) -> None:
    """Load the weights; ValueError if tensors would be left without values."""
    stored = set(model.state_dict())
    named = [*model.named_parameters(), *model.named_buffers()]
    empty = [name for name, tensor in named if tensor.is_meta]
    if lost := empty if weights_location is None else [name for name in empty if name not in stored]:
        raise ValueError(
            f"tensors on the meta device have no values: {', '.join(lost)}; load them, or give a weights_location "
            "that has them (buffers that are not persistent are in no file: make them on the CPU)"
        )
    if weights_location is None:
        return
    for part in model.modules():
        if any(tensor.is_meta for tensor in [*part.parameters(False), *part.buffers(False)]):
            part.to_empty(device="cpu", recurse=False)
    load_checkpoint_in_model(model, weights_location, strict=bool(empty))


def _find_layers(model: nn.Module, config: BnbQuantizationConfig) -> dict[nn.Linear, list[str]]:
    """Return the layers to quantize, each with all its names."""
    skipped = [*_find_skipped(model, config), *(config.keep_in_fp32_modules or ())]
    return {
        part: names
        for part, names in list_names(model).items()
        if type(part) is nn.Linear
        and part is not model
        and not any(_is_within(name, skipped) for name in names)
    }


def _find_skipped(model: nn.Module, config: BnbQuantizationConfig) -> list[str]:
    if config.skip_modules is not None:
        return config.skip_modules
    owners: dict[nn.Parameter, list[str]] = {}
    linear: list[str] = []
    for name, part in model.named_modules():
        for parameter in part.parameters(False):
            owners.setdefault(parameter, []).append(name)
        linear += [name] if type(part) is nn.Linear else []
    tied = [name for names in owners.values() if len(names) > 1 for name in names]
    return [*linear[-1:], *(name for name in linear if name in tied and name != linear[-1])]


def _is_within(name: str, modules: Sequence[str]) -> bool:
    """Return True if a name is that of a module or of a part of one; `head` also means `model.head`."""
    return any(f".{module}." in f".{name}." for module in modules)


def _quantize(layer: nn.Linear, config: BnbQuantizationConfig) -> Any:
    """Return a layer of bitsandbytes with the same weights; it quantizes them when it moves to a device."""
    kinds: Any = importlib.import_module("bitsandbytes.nn")
    sizes = layer.in_features, layer.out_features, layer.bias is not None
    weight = layer.weight.detach().cpu()
    if config.load_in_8bit:
        threshold = config.llm_int8_threshold
        made = kinds.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=threshold, device="meta")
        made.weight = kinds.Int8Params(weight, requires_grad=False)
    else:
        made = kinds.Linear4bit(*sizes, compute_dtype=config.bnb_4bit_compute_dtype, device="meta")
        made.weight = kinds.Params4bit(
            weight,
            requires_grad=False,
            compress_statistics=config.bnb_4bit_use_double_quant,
            quant_type=config.bnb_4bit_quant_type,
            module=made,
        )
    if layer.bias is not None:
        dtype: Any = config.torch_dtype
        made.bias = nn.Parameter(layer.bias.detach().to(dtype), requires_grad=False)
    return made.train(layer.training)


def _cast(model: nn.Module, config: BnbQuantizationConfig) -> None:
    keep = config.keep_in_fp32_modules or ()
    for part, names in list_names(model).items():
        kept = any(_is_within(name, keep) for name in names)
        dtype: Any = torch.float32 if kept else config.torch_dtype
        for tensor in [*part.parameters(False), *part.buffers(False)]:
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
