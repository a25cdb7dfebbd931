"""In a worker: lets processes that it spawns have the classes and functions of cells, which no module can give them.

A data loader's workers are such processes on macOS. Pickles name a class of a cell as one of `__main__`, where a
spawned process has nothing; a fork has all that its parent has.
"""

from __future__ import annotations

import pickle
import sys
import types
from multiprocessing import context
from multiprocessing.reduction import ForkingPickler
from typing import Any

from ..transfer.pickling import Names, pack


def hand_down() -> None:
    """Let what a process is started with bring along the classes and functions of `__main__` that it names."""
    ForkingPickler.reducer_override = _reduce  # type: ignore[assignment,method-assign]


def _reduce(pickler: ForkingPickler, obj: Any) -> Any:
    """Return how an object is pickled; `reducer_override` of the standard library's `pickle.Pickler`."""
    if context.get_spawning_popen() is None or not isinstance(obj, (type, types.FunctionType)):
        return NotImplemented
    name = obj.__qualname__
    if obj.__module__ != "__main__" or vars(sys.modules["__main__"]).get(name) is not obj:
        return NotImplemented
    return _take, (name, pack((obj, Names()), in_band=True, leaves_run=False).data)


def _take(name: str, pickled: bytes) -> Any:
    """Return a class or function, and keep it, with those that it uses, where pickles look for names."""
    kept = vars(sys.modules["__main__"])
    if name not in kept:
        found, names = pickle.loads(pickled)
        kept.update({name: found, **names})
        hand_down()
    return kept[name]
