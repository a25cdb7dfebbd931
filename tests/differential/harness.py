"""Run the same functions with Accelerate and with this package on N gloo ranks, and compare what they return."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import os
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from tests.unit.multiprocess import do_without_deepspeed, run_ranks

REFERENCE, OURS = "accelerate", "notebook_accel"
# the cases of a group share one set of processes for each library, which a single test has to wait for
GROUPS = (("accumulation", "schedulers", "precision", "collecting"), ("objects",), ("tools",))

Case = Callable[[Any], Any]
"""Takes one of the two packages and returns what is to be equal."""


@functools.cache
def cases(group: tuple[str, ...]) -> dict[str, Case]:
    """Return the functions of these case modules by `module: name`."""
    found: dict[str, Case] = {}
    for name in group:
        own: Mapping[str, Case] = importlib.import_module(f"tests.differential.{name}").CASES
        found |= {f"{name}: {case}": function for case, function in own.items()}
    return found


@functools.cache
def outcomes(library: str, world_size: int, group: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return for each rank what every case of a group gave."""
    return run_ranks(run_all, library, group, world_size=world_size, timeout=240)


def run_all(library: str, group: tuple[str, ...]) -> dict[str, Any]:
    """Run every case of a group in this rank; a case that raises gives its exception's name."""
    if os.environ["WORLD_SIZE"] == "1":
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    warnings.simplefilter("ignore")
    if library == REFERENCE:
        do_without_deepspeed()
    package = importlib.import_module(library)
    importlib.import_module(f"{library}.utils")
    seen = {}
    for name, case in cases(group).items():
        reset(library)
        try:
            seen[name] = plain(case(package))
        except Exception as error:
            seen[name] = {"raised": type(error).__name__, "because": traceback.format_exc()}
    return seen


def reset(library: str) -> None:
    """Let the next case start without an accelerator; the process group stays."""
    import torch

    torch.manual_seed(0)
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    state = importlib.import_module(f"{library}.state")
    state.AcceleratorState._reset_state(True)
    state.GradientState._reset_state()


def plain(value: Any) -> Any:
    """Return the value as built-in types that say all that is to be equal."""
    import torch

    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), list(value.shape), value.detach().tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "_fields"):
        return (type(value).__name__, [plain(item) for item in value])
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (type(value).__name__, plain(vars(value)))
    return value


def differences(ours: Any, theirs: Any, where: str = "") -> list[str]:
    """Return a sentence for each place where the two differ by more than rounding."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if "raised" in ours or "raised" in theirs:
            return _raised(ours, theirs)
        found = [f"{where}: keys {sorted(ours)} != {sorted(theirs)}"] if ours.keys() != theirs.keys() else []
        both = [key for key in ours if key in theirs]
        return found + [
            text for key in both for text in differences(ours[key], theirs[key], f"{where}.{key}")
        ]
    if isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        if len(ours) != len(theirs):
            return [f"{where}: {ours} != {theirs}"]
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [text for index, (a, b) in pairs for text in differences(a, b, f"{where}[{index}]")]
    if isinstance(ours, float) and isinstance(theirs, float):
        same = math.isclose(ours, theirs, rel_tol=1e-6, abs_tol=1e-7) or (ours != ours and theirs != theirs)
        return [] if same else [f"{where}: {ours} != {theirs}"]
    same = ours == theirs and type(ours) is type(theirs)
    return [] if same else [f"{where}: {ours!r} != {theirs!r}"]


def _raised(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    if ours.get("raised") == theirs.get("raised"):
        return []
    blame = [
        f"{name}: {side['because']}"
        for name, side in (("ours", ours), ("theirs", theirs))
        if "raised" in side
    ]
    return [f"raised {ours.get('raised')} != {theirs.get('raised')}", *blame]
