"""Seeds all random generators, and copies the random states of rank 0 to all processes."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from . import detect, devices, environ
from . import runtime as process
from .choices import Choice
from .comm import ops, xla
from .config.argument_checks import check_integer
from .runtime import Runtime


class RNGType(Choice):
    """A source of random numbers: torch, a kind of device, or a generator of the caller."""

    TORCH = "torch"
    CUDA = "cuda"
    HPU = "hpu"
    MLU = "mlu"
    MPS = "mps"
    MUSA = "musa"
    NEURON = "neuron"
    NPU = "npu"
    SDAA = "sdaa"
    XLA = "xla"
    XPU = "xpu"
    GENERATOR = "generator"


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed `random`, NumPy, and torch with all its devices; no device is initialised.

    Args:
        seed: from 0 to 2**32 - 1, which are NumPy's limits.
        device_specific: add the rank to the seed, so that processes draw different numbers.
        deterministic: make torch use deterministic algorithms only; it raises for operations that have none.

    Raises:
        TypeError: the seed is no integer.
        ValueError: it is out of bounds, alone or with the rank.
    """
    _check_seed(seed)
    if device_specific:
        seed += detect.ensure().topology.rank
        _check_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # also seeds devices that are initialised later
    if (current := process.current()) is not None and current.device.type == "xla":
        xla.set_seed(seed)  # a device that is not in use yet takes its seed from torch
    if deterministic:
        if torch.backends.cuda.is_built() and environ.get("CUBLAS_WORKSPACE_CONFIG") is None:
            environ.put({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
        torch.use_deterministic_algorithms(True)


def list_sources() -> list[str]:
    """Return the legal rng types: those of `RNGType`, and an accelerator of this torch that it does not name."""
    return [*RNGType.list(), *(name for name in devices.list_modules() if name not in RNGType)]


def _check_seed(seed: int) -> None:
    for error in check_integer(0, 2**32 - 1)("seed", seed):
        raise error


def synchronize_rng_states(
    rng_types: Iterable[str | RNGType],
    generator: torch.Generator | None = None,
    *,
    runtime: Runtime | None = None,
) -> None:
    """Copy random states of rank 0 to all processes.

    Args:
        rng_types: the sources.
        generator: see `synchronize_rng_state`.
        runtime: see `synchronize_rng_state`.

    Raises:
        ValueError: see `synchronize_rng_state`.
    """
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator, runtime=runtime)


def synchronize_rng_state(
    rng_type: str | RNGType | None = None,
    generator: torch.Generator | None = None,
    *,
    runtime: Runtime | None = None,
) -> None:
    """Copy the random state of rank 0 to all processes; all of them call it.

    Args:
        rng_type: the source.
        generator: the source if `rng_type` is `generator`; has no effect otherwise.
        runtime: of this process; by default the installed one.

    Raises:
        ValueError: the source is unknown, or this process has no such device or generator.
    """
    kind = str(rng_type)
    if kind not in list_sources():
        raise ValueError(f"rng type {rng_type!r} is unknown, choose among {', '.join(list_sources())}")
    if kind == RNGType.GENERATOR and generator is None:
        raise ValueError("rng type 'generator' needs a generator")
    comm = (runtime or detect.ensure()).comm
    if comm.world_size == 1:
        return
    state = ops.broadcast(comm, _get(kind, generator).clone().to(comm.device)).cpu()
    if comm.rank != 0:
        _set(kind, generator, state)


def _get(kind: str, generator: torch.Generator | None) -> torch.Tensor:
    if kind == RNGType.GENERATOR and generator is not None:
        return generator.get_state()
    if kind == RNGType.TORCH:
        return torch.get_rng_state()
    if kind == RNGType.XLA:
        _require_xla()
        return torch.tensor(list(xla.seed().to_bytes(8, "little")), dtype=torch.uint8)
    state: torch.Tensor = _module(kind).get_rng_state()
    return state


def _set(kind: str, generator: torch.Generator | None, state: torch.Tensor) -> None:
    if kind == RNGType.GENERATOR and generator is not None:
        generator.set_state(state)
    elif kind == RNGType.TORCH:
        torch.set_rng_state(state)
    elif kind == RNGType.XLA:
        xla.set_seed(int.from_bytes(bytes(state.tolist()), "little"))
    else:
        _module(kind).set_rng_state(state)


def _require_xla() -> None:
    current = process.current()
    if current is None or current.device.type != "xla":
        raise ValueError("rng type 'xla' cannot be synchronised: this process uses no such device")


def _module(kind: str) -> Any:
    module = getattr(torch, kind, None)
    if module is None or not module.is_available():
        raise ValueError(f"rng type {kind!r} cannot be synchronised: there is no such device here")
    return module
