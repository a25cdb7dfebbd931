"""Converts linear layers to float8 by torchao."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import environ, probes
from .caller import warn
from .choices import Choice
from .combinations import refuse
from .dtensors import is_sharded
from .handlers import KwargsHandler

_MULTIPLE = 16  # the float8 matrix product requires it for both sizes of a layer
_CAPABILITY = (8, 9)


class FP8BackendType(Choice):
    """The library that computes in float8; only AO, which is torchao, is supported."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"


@dataclass
class AORecipeKwargs(KwargsHandler):
    """How torchao converts linear layers to float8.

    Attributes:
        config: a `torchao.float8.Float8LinearConfig`; replaces the last two fields.
        module_filter_func: gets a module and its name, and returns whether to convert it. By default it chooses linear
            layers whose sizes are multiples of 16, but not the model's first and last.
        pad_inner_dim: pad batches to multiples of 16; by default ACCELERATE_FP8_PAD_INNER_DIM, else True.
        enable_fsdp_float8_all_gather: FSDP sends weights in float8; by default
            ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER, else False. Without FSDP it has no effect.

    Raises:
        ImportError: torchao is not installed.
    """

    config: Any = None
    module_filter_func: Callable[[torch.nn.Module, str], bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    def _prepare_check(self, name: str, before: Any) -> None:
        if name in ("pad_inner_dim", "enable_fsdp_float8_all_gather"):
            self.config = None  # it is made of these

    def _complete_fields(self) -> None:
        require_torchao()
        if self.config is not None:
            return
        if self.pad_inner_dim is None:
            self.pad_inner_dim = environ.flag("ACCELERATE_FP8_PAD_INNER_DIM", True)
        if self.enable_fsdp_float8_all_gather is None:
            self.enable_fsdp_float8_all_gather = environ.flag("ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER")
        from torchao.float8 import Float8LinearConfig

        self.config = Float8LinearConfig(
            pad_inner_dim=self.pad_inner_dim,
            enable_fsdp_float8_all_gather=self.enable_fsdp_float8_all_gather,
        )


def require_torchao() -> None:
    """Raise ImportError if torchao is not installed, or cannot be imported beside this torch."""
    if not probes.is_available("torchao"):
        raise ImportError("mixed_precision 'fp8' is torchao's, which is not installed: pip install torchao")
    try:
        import torchao.float8 as _  # noqa: F401
    except (ImportError, AttributeError) as error:  # a name that torch got in another release
        raise ImportError(
            f"mixed_precision 'fp8': torchao {probes.version('torchao')} does not fit torch {torch.__version__} "
            f"({error}): install the torchao that was released with that torch"
        ) from error


def check(device: torch.device) -> None:
    """Check that this process can compute in float8.

    Args:
        device: where models run.

    Raises:
        ImportError: torchao is not installed.
        ValueError: the device does not support float8, or ACCELERATE_FP8_BACKEND names another library.
    """
    wanted = environ.get("ACCELERATE_FP8_BACKEND") or "AO"
    if wanted.upper() not in ("AO", "NO"):
        raise ValueError(
            f"environment variable ACCELERATE_FP8_BACKEND={wanted!r}: only 'AO', which is torchao, is supported"
        )
    require_torchao()
    if device.type == "cuda":
        own = torch.cuda.get_device_capability(device)
        if own < _CAPABILITY:
            raise ValueError(
                f"mixed_precision 'fp8' needs a GPU of compute capability {'.'.join(map(str, _CAPABILITY))} or "
                f"later, and {torch.cuda.get_device_name(device)} has {'.'.join(map(str, own))}: use 'bf16'"
            )
    elif device.type != "cpu":
        raise refuse("fp8, device", device.type)


def convert(model: torch.nn.Module, recipe: AORecipeKwargs, *, will_be_sharded: bool = False) -> None:
    """Replace linear layers of a model by float8 layers with the same weights.

    Args:
        model: changed in place, unless it has float8 layers already.
        recipe: how to convert, and which layers.
        will_be_sharded: FSDP will shard the weights: they become what it can send in float8, if the recipe wants that.

    Raises:
        ValueError: the model itself is a linear layer, which cannot be replaced in place, or its weights are sharded.
    """
    from torchao.float8 import convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    if any(isinstance(part, Float8Linear) for part in model.modules()):
        return
    is_chosen = recipe.module_filter_func or _inner_layers(model)
    linear = [(part, name) for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)]
    if not any(is_chosen(part, name) for part, name in linear):
        warn(
            f"mixed_precision 'fp8' found no layer to convert in {type(model).__name__}, which runs in bfloat16: by "
            f"default linear layers with sizes of multiples of {_MULTIPLE} are converted, but the first and the last",
        )
        return
    if any(is_sharded(parameter) for parameter in model.parameters()):
        raise refuse("fp8, sharded", type(model).__name__)
    if isinstance(model, torch.nn.Linear) and is_chosen(model, ""):
        raise ValueError("a model that is a single linear layer cannot be converted to float8 in place")
    config = recipe.config
    if (
        not will_be_sharded and config.enable_fsdp_float8_all_gather
    ):  # DistributedDataParallel crashes on such weights
        config = dataclasses.replace(config, enable_fsdp_float8_all_gather=False)
    convert_to_float8_training(model, module_filter_fn=is_chosen, config=config)


def allow_weights(error: str) -> bool:
    """Let `torch.load` read weights that FSDP sends in float8, of which sharded checkpoints are made.

    torchao allows that itself when it is imported, its newest versions alone.

    Args:
        error: what reading said.

    Returns:
        Whether reading may be tried again: such weights were refused, and torchao is there.
    """
    if "torchao.float8.fsdp_utils" not in error or not probes.is_available("torchao"):
        return False
    require_torchao()
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    torch.serialization.add_safe_globals([WeightWithDynamicFloat8CastTensor])
    return True


def precompute_scales(model: torch.nn.Module) -> None:
    """Compute the scales with which FSDP sends weights in float8, for all layers with one collective.

    Without it each layer computes its own, with a collective of its own, in every forward.

    Args:
        model: sharded. All processes call it, after each step of the optimizer.
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


def _inner_layers(model: torch.nn.Module) -> Callable[[torch.nn.Module, str], bool]:
    """Return the default filter; the first and last layers stay precise, which keeps training stable."""
    names = [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)]
    outer = {names[0], names[-1]} if names else set()

    def is_inner(module: torch.nn.Module, name: str) -> bool:
        if not isinstance(module, torch.nn.Linear) or name in outer:
            return False
        return module.in_features % _MULTIPLE == 0 and module.out_features % _MULTIPLE == 0

    return is_inner
