"""save and load: torch.save and torch.load with safer defaults."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .. import detect
from ..caller import warn
from ..comm.xla import to_cpu
from ..runtime import Runtime
from . import pickled, rawio, weights
from .folder import is_abandoned, make_token


def write(obj: Any, f: Any, safe_serialization: bool = False) -> None:
    """Write an object to a file, whole or not at all. A warning names tensors that safetensors files leave out.

    Args:
        obj: any object; with `safe_serialization` tensors by name, of which those of the same memory are written once.
        f: a path, where a file is replaced and a device is written to; or an open file.
        safe_serialization: write safetensors, not a file of torch.save.

    Raises:
        IsADirectoryError: the path is a folder.
        ValueError: `safe_serialization` with an open file, a device, or with what is no tensor.
    """
    obj = to_cpu(obj)
    if not isinstance(f, (str, os.PathLike)):
        if safe_serialization:
            raise ValueError("safe_serialization=True writes to a path, not to an open file")
        torch.save(obj, f)
        return
    path = Path(os.path.realpath(f)) if os.path.islink(f) else Path(f)
    if path.exists() and not path.is_file():
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder: give the name of a file")
        if safe_serialization:
            raise ValueError(f"safe_serialization=True writes to a file, and {path} is a device or pipe")
        with open(path, "wb") as file:  # never replaced
            torch.save(obj, file)
        return
    for left in path.parent.glob(f"{glob.escape(path.name)}.part-*"):
        if is_abandoned(left):
            left.unlink(missing_ok=True)
    part = path.with_name(f"{path.name}.part-{make_token()}")
    try:
        with rawio.name_file(path):
            if safe_serialization:
                tensors, dropped = weights.without_ties(obj)
                weights.write(part, tensors, dropped)
                _warn_of_ties(dropped)
            else:
                pickled.write(part, obj)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    rawio.sync(path.parent)


def _warn_of_ties(dropped: Mapping[str, str]) -> None:
    """Name what a reader will miss: safetensors files hold no tensor twice."""
    if dropped:
        pairs = ", ".join(f"{name!r} ({kept!r})" for name, kept in dropped.items())
        warn(
            "removed shared tensors: a safetensors file holds each once. Whoever loads it has to give these the memory "
            f"of those in brackets, as tied weights of a model have: {pairs}"
        )


def save(
    obj: Any,
    f: Any,
    save_on_each_node: bool = False,
    safe_serialization: bool = False,
    *,
    runtime: Runtime | None = None,
) -> None:
    """Write an object in one process.

    Args:
        obj: see `write`, as for `f` and `safe_serialization`.
        f: see `obj`.
        save_on_each_node: write in the first process of each node, not in rank 0 alone.
        safe_serialization: see `obj`.
        runtime: of the process; by default the one that is installed.
    """
    topology = (runtime or detect.ensure()).topology
    if topology.is_local_main if save_on_each_node else topology.is_main:
        write(obj, f, safe_serialization)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Return the object in a file of torch.save; NumPy arrays in it are allowed.

    Args:
        f: a path or an open file.
        map_location: where tensors go, see `torch.load`.
        kwargs: other arguments of `torch.load`; `weights_only` is True by default.
    """
    return pickled.load(f, map_location=map_location, **kwargs)
