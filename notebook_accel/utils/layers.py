"""Which layers of a model are, or may be, of few bits."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from typing import Any, Final

import torch

from ..fp8 import require_torchao

_MULTIPLE: Final = 16  # the float8 matrix product requires it for both sizes of a layer


def find_first_last_linear_layers(model: torch.nn.Module) -> tuple[str | None, str | None]:
    """Return the names of the first and of the last linear layer; None where there is none.

    Args:
        model: any.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: torch.nn.Module, fqn: str, layers_to_filter: Collection[str | None]) -> bool:
    """Return True for a layer that may compute in float8.

    Args:
        module: a linear layer needs sizes that are multiples of 16.
        fqn: its name in the model.
        layers_to_filter: names of those that may not.
    """
    if isinstance(module, torch.nn.Linear) and (
        module.in_features % _MULTIPLE or module.out_features % _MULTIPLE
    ):
        return False
    return fqn not in layers_to_filter


def filter_first_and_last_linear_layers(module: torch.nn.Module, fqn: str) -> bool:
    """Return True for a layer that may compute in float8, and is not the first or last linear one in itself.

    Args:
        module: a layer, or a model.
        fqn: the name of a layer.
    """
    return filter_linear_layers(module, fqn, find_first_last_linear_layers(module))


def has_ao_layers(model: torch.nn.Module) -> bool:
    """Return True if torchao computes layers of a model in float8.

    Args:
        model: any.

    Raises:
        ImportError: torchao is not installed.
    """
    require_torchao()
    from torchao.float8.float8_linear import Float8Linear

    return any(isinstance(module, Float8Linear) for module in model.modules())


def convert_model_to_fp8_ao(
    model: torch.nn.Module,
    config: Any = None,
    module_filter_func: Callable[[torch.nn.Module, str], bool] | None = None,
) -> None:
    """Let torchao compute linear layers in float8, in place.

    Args:
        model: its layers are replaced.
        config: a `torchao.float8.Float8LinearConfig`.
        module_filter_func: gets a module and its name, and returns whether to convert it; by default
            `filter_linear_layers` without the first and the last one.

    Raises:
        ImportError: torchao is not installed.
    """
    require_torchao()
    from torchao.float8 import convert_to_float8_training

    ends = find_first_last_linear_layers(model)
    chosen = module_filter_func or (lambda module, name: filter_linear_layers(module, name, ends))
    convert_to_float8_training(model, module_filter_fn=chosen, config=config)


def has_4bit_bnb_layers(model: torch.nn.Module) -> bool:
    """Return True if a model has layers of 4 bits by bitsandbytes.

    Args:
        model: any.
    """
    kind = importlib.import_module("bitsandbytes").nn.Linear4bit
    return any(isinstance(module, kind) for module in model.modules())


def get_parameter_device(parameter: torch.nn.Module) -> torch.device:
    """Return the device of a module's first parameter.

    Args:
        parameter: the module.
    """
    return next(parameter.parameters()).device
