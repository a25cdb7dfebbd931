"""Weights that several modules share: finds them, checks them, and shares them again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..caller import warn
from ..hooks import tensors
from .sizes import is_within

Device = int | str | torch.device


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Return the names of each parameter that has several.

    Args:
        model: with the parameters.
        kwargs: none are known; Accelerate's signature has them.

    Returns:
        A sorted list of names for each such parameter.

    Raises:
        TypeError: there are keywords.
    """
    if kwargs:
        raise TypeError(f"find_tied_parameters takes a model alone, not {', '.join(kwargs)}")
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Sequence[tuple[str, nn.Module]],
) -> tuple[int, list[str], list[nn.Module]]:
    """Return how large a module is together with those that share its parameters, which have to be where it is.

    Args:
        tied_params: names of its parameters elsewhere, each in another one of `modules_to_treat`.
        module_size: of the module alone, in bytes.
        module_sizes: of `compute_module_sizes`.
        modules_to_treat: modules by name.

    Returns:
        The bytes, in which shared ones count once, and the names and the modules that share, in the order of
        `tied_params`.

    Raises:
        ValueError: none of the modules has a parameter of that name.
    """
    found = []
    for tied in tied_params:
        owner = next((item for item in modules_to_treat if is_within(tied, item[0])), None)
        if owner is None:
            raise ValueError(
                f"no module of {[name for name, _ in modules_to_treat]} has the parameter {tied}"
            )
        found.append(owner)
        module_size += module_sizes[owner[0]] - module_sizes[tied]
    return module_size, [name for name, _ in found], [module for _, module in found]


def retie_parameters(model: nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Make the names of each group one parameter again: the first that has values, else the first.

    Args:
        model: with the parameters.
        tied_params: of `find_tied_parameters`.
    """
    for group in tied_params:
        places = [tensors.find_owner(model, name) for name in group]
        found = [owner._parameters[key] for owner, key in places]
        kept = next((item for item in found if item is not None and not item.is_meta), found[0])
        for owner, key in places:
            owner._parameters[key] = kept


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Return True if the config of a transformers model asks for shared weights.

    Args:
        model: any model; one without a config shares none.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_output_embeddings"):
        return False
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    words = bool(getattr(text, "tie_word_embeddings", False)) and model.get_output_embeddings() is not None  # type: ignore[operator]
    return words or bool(getattr(config, "tie_encoder_decoder", False))


def find_device(name: str, device_map: Mapping[str, Device]) -> Device | None:
    """Return the device of the longest name in a map that this name lies within.

    Args:
        name: a full name.
        device_map: a device by name.

    Returns:
        The device, None if the map has no such name.
    """
    while name not in device_map:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return device_map[name]


def check_tied_parameters_on_same_device(
    tied_params: Sequence[Sequence[str]], device_map: Mapping[str, Device]
) -> None:
    """Warn of shared weights that a map puts on several devices: each device gets its own copy.

    Args:
        tied_params: of `find_tied_parameters`.
        device_map: a device by name.
    """
    for group in tied_params:
        places = {name: find_device(name, device_map) for name in group}
        if len(set(places.values())) > 1:
            warn(
                f"the device map puts one weight on several devices, each gets its own copy: {places}; "
                "infer_auto_device_map keeps them together",
            )


def find_tied_elsewhere(name: str, groups: Sequence[Sequence[str]]) -> list[str]:
    """Return the other names of weights in a module that lie outside it.

    Args:
        name: of a module or a tensor.
        groups: of `find_tied_parameters`.
    """
    return [
        other
        for group in groups
        if any(is_within(one, name) for one in group)
        for other in group
        if not is_within(other, name)
    ]
