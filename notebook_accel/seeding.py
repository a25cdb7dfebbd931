"""Seeds and random states: set them everywhere, or make all processes' states that of rank 0."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterable
from typing import Any

import torch

from . import detect, environ, probes
from . import runtime as process
from .choices import Choice
from .comm import ops, xla
from .runtime import Runtime


class RNGType(Choice):
    """A source of random numbers: torch's, that of a device torch has a module for, or a generator given."""

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
    """Seed `random`, NumPy where it is installed, torch and all its devices; none of these is initialised by it.

    Args:
        seed: from 0 to 2**32 - 1, as NumPy demands.
        device_specific: add the rank, so that processes draw different numbers.
        deterministic: let torch use deterministic algorithms only; it raises where it has none.
    """
    if device_specific:
        seed += detect.ensure().topology.rank
    random.seed(seed)
    if probes.is_available("numpy"):
        importlib.import_module("numpy").random.seed(seed)
    torch.manual_seed(seed)  # a device that is not initialised yet is seeded when it is
    if (current := process.current()) is not None and current.device.type == "xla":
        xla.set_seed(seed)  # one that is not in use yet takes its seed from torch
    if deterministic:
        if torch.backends.cuda.is_built() and environ.get("CUBLAS_WORKSPACE_CONFIG") is None:
            environ.put({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
        torch.use_deterministic_algorithms(True)


def synchronize_rng_states(
    rng_types: Iterable[str | RNGType],
    generator: torch.Generator | None = None,
    *,
    runtime: Runtime | None = None,
) -> None:
    """Give all processes rank 0's random states; see `synchronize_rng_state`."""
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator, runtime=runtime)


def synchronize_rng_state(
    rng_type: str | RNGType | None = None,
    generator: torch.Generator | None = None,
    *,
    runtime: Runtime | None = None,
) -> None:
    """Give all processes rank 0's state of one source; `generator` in `rng_type` means the generator passed.

    ValueError if the source is unknown or not there.
    """
    if rng_type not in RNGType:
        raise ValueError(f"rng type {rng_type!r} is unknown, choose among {', '.join(RNGType.list())}")
    kind = RNGType(rng_type)
    if kind is RNGType.GENERATOR and generator is None:
        raise ValueError("rng type 'generator' needs a generator")
    comm = (runtime or detect.ensure()).comm
    if comm.world_size == 1:
        return
    state = ops.broadcast(comm, _get(kind, generator).clone().to(comm.device)).cpu()
    if comm.rank != 0:
        _set(kind, generator, state)


def _get(kind: RNGType, generator: torch.Generator | None) -> torch.Tensor:
    if kind is RNGType.GENERATOR and generator is not None:
        return generator.get_state()
    if kind is RNGType.TORCH:
        return torch.get_rng_state()
    if kind is RNGType.XLA:
        _require_xla()
        return torch.tensor(list(xla.seed().to_bytes(8, "little")), dtype=torch.uint8)
    state: torch.Tensor = _module(kind).get_rng_state()
    return state


def _set(kind: RNGType, generator: torch.Generator | None, state: torch.Tensor) -> None:
    if kind is RNGType.GENERATOR and generator is not None:
        generator.set_state(state)
    elif kind is RNGType.TORCH:
        torch.set_rng_state(state)
    elif kind is RNGType.XLA:
        xla.set_seed(int.from_bytes(bytes(state.tolist()), "little"))
    else:
        _module(kind).set_rng_state(state)


def _require_xla() -> None:
    current = process.current()
    if current is None or current.device.type != "xla":
        raise ValueError("rng type 'xla' cannot be synchronised: this process uses no such device")


def _module(kind: RNGType) -> Any:
    module = getattr(torch, kind.value, None)
    if module is None or not module.is_available():
        raise ValueError(f"rng type {kind.value!r} cannot be synchronised: there is no such device here")
    return module
