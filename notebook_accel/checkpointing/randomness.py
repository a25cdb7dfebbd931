"""The random states of a process, and those of a rank that the checkpoint does not know."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import devices
from ..comm import xla
from ..errors import CheckpointError

_KEYS = ("random_state", "torch_manual_seed")
_OWN = "device_index"
"""Key of ours: which of the devices the process computed on."""


def capture(step: int, device: torch.device) -> dict[str, Any]:
    """Return the state of every random generator of this process, with the step, under Accelerate's keys.

    Args:
        step: of the accelerator.
        device: of this process. Generators of other kinds of devices are left out, unless the process uses them.
    """
    states: dict[str, Any] = {"step": step, "random_state": random.getstate()}
    states["numpy_random_seed"] = np.random.get_state()
    states["torch_manual_seed"] = torch.get_rng_state()
    for key, module in _list_modules(device).items():
        states[key] = _read(module)
    if device.index is not None:
        states[_OWN] = device.index
    if device.type == "xla":
        states["xm_seed"] = xla.seed()
    return states


def check(path: Path, states: Any) -> None:
    """Check that `apply` can set these random states.

    Args:
        path: of their file, for the message.
        states: what the file holds.

    Raises:
        CheckpointError: they are no random states, or damaged.
    """
    if not isinstance(states, dict):
        raise CheckpointError(f"{path} holds a {type(states).__name__}, no random states")
    for key in _KEYS:
        if key not in states:
            raise CheckpointError(f"{path} has no key {key!r}")
    try:
        random.Random().setstate(states["random_state"])
        torch.Generator().set_state(states["torch_manual_seed"])
    except (TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} holds random states that do not fit: {error}") from error


def apply(states: Mapping[str, Any], device: torch.device) -> None:
    """Set the generators that the states name and this process has.

    Args:
        states: as `capture` returned them; those of several GPUs go to the GPUs in order. That of the GPU which the
            process computed on goes to this process's, which may have another number: under Ray each process sees one.
        device: of this process.
    """
    random.setstate(states["random_state"])
    if "numpy_random_seed" in states:
        np.random.set_state(states["numpy_random_seed"])
    torch.set_rng_state(states["torch_manual_seed"])
    if isinstance(states.get("xm_seed"), int) and device.type == "xla":
        xla.set_seed(states["xm_seed"])
    for key, module in _list_modules(device).items():
        stored, own = states.get(key, ()), states.get(_OWN)
        _write(module, stored)
        if key == _key_of(device.type) and isinstance(own, int) and own < len(stored):
            module.set_rng_state(stored[own], device.index or 0)


def derive(states: Mapping[str, Any], rank: int, device: torch.device) -> dict[str, Any]:
    """Return random states for a rank without states in the checkpoint.

    The seed is the first 4 bytes of SHA-256 over that rank's torch state and the decimal new rank: the same
    checkpoint and rank always give the same numbers, and other ranks other numbers.

    Args:
        states: of another rank.
        rank: the new rank.
        device: of this process.
    """
    text = bytes(states["torch_manual_seed"].tolist()) + str(rank).encode()
    seed = int.from_bytes(hashlib.sha256(text).digest()[:4], "little")
    derived: dict[str, Any] = {key: value for key, value in states.items() if key in ("step", "counts")}
    derived["random_state"] = random.Random(seed).getstate()
    derived["numpy_random_seed"] = np.random.RandomState(seed).get_state()
    derived["torch_manual_seed"] = torch.Generator().manual_seed(seed).get_state()
    if "xm_seed" in states:
        derived["xm_seed"] = seed
    for key, module in _list_modules(device).items():
        before = _read(module)
        module.manual_seed_all(seed)
        derived[key] = _read(module)
        _write(module, before)
    return derived


def _read(module: Any) -> list[torch.Tensor]:
    """Return the random states of all devices of a kind, in order."""
    return [module.get_rng_state(index) for index in range(module.device_count())]


def _write(module: Any, states: Sequence[torch.Tensor]) -> None:
    """Set the random states of the devices of a kind, in order."""
    for index, state in zip(range(module.device_count()), states, strict=False):
        module.set_rng_state(state, index)


def _key_of(kind: str) -> str:
    return f"torch_{kind}_manual_seed"


def _list_modules(device: torch.device) -> dict[str, Any]:
    """Return torch's modules of the kinds of devices that this process uses, by the key of their states.

    A kind that it does not use is not asked for its state: that would initialise its devices.
    """
    initialized = devices.list_initialized()
    return {
        _key_of(kind): module
        for kind, module in devices.list_modules().items()
        if (device.type == kind or kind in initialized) and module.is_available()
    }
