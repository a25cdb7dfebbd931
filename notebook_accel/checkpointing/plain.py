"""save and load: torch.save and torch.load with safer defaults."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from .. import detect
from ..comm.xla import to_cpu
from ..runtime import Runtime
from . import pickled, rawio, weights


def write(obj: Any, f: Any, safe_serialization: bool = False) -> None:
    """Write an object to a file, whole or not at all, or to something that can be written to, such as a device.

    With `safe_serialization` the object is tensors by name; names of the same memory are written once.
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
    part = path.with_name(f"{path.name}.part")
    try:
        if safe_serialization:
            tensors, dropped = weights.without_ties(obj)
            weights.write(part, tensors, dropped)
        else:
            pickled.write(part, obj)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    rawio.sync(path.parent)


def save(
    obj: Any,
    f: Any,
    save_on_each_node: bool = False,
    safe_serialization: bool = False,
    *,
    runtime: Runtime | None = None,
) -> None:
    """Write an object in rank 0, or with `save_on_each_node` in the first process of each node; see `write`."""
    topology = (runtime or detect.ensure()).topology
    if topology.is_local_main if save_on_each_node else topology.is_main:
        write(obj, f, safe_serialization)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Return what torch.load makes of a file, with `weights_only` unless told otherwise.

    NumPy arrays are allowed too. `kwargs` go to torch.load.
    """
    return pickled.load(f, map_location=map_location, **kwargs)
