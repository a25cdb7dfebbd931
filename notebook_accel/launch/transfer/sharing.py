"""Memory that is meant to be shared, on its way to fresh processes: all of them and the notebook have the same.

multiprocessing and torch pickle such memory for one process, while that is being started. Here it is pickled for any
number of them: each gets duplicates of the descriptors beside the pickle.
"""

from __future__ import annotations

import ctypes
import io
import os
from dataclasses import dataclass
from multiprocessing import context, heap, sharedctypes
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.multiprocessing import reductions

_reduce_ctype: Any = sharedctypes.reduce_ctype  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A descriptor as multiprocessing's pickles have it: its index in the list that travels, then its number."""

    number: int

    def detach(self) -> int:
        return self.number


class Sharing:
    """Takes the place of the process that multiprocessing starts, which it asks to duplicate descriptors.

    Attributes:
        fds: the duplicates.
    """

    def __init__(self) -> None:
        self.fds: list[int] = []
        self._reducers = ForkingPickler(io.BytesIO()).dispatch_table

    def duplicate_for_child(self, fd: int) -> int:
        if fd < 0:
            raise AttributeError("a file that torch has mapped privately has no descriptor")
        self.fds.append(os.dup(fd))
        return len(self.fds) - 1

    DupFd = Descriptor

    def reduce(self, obj: Any) -> Any:
        """Return how shared memory, or what lies in it, is pickled; None for everything else."""
        if type(obj) in (np.ndarray, np.memmap):
            return self._reduce_array(obj)
        reduce: Any = self._reducers.get(type(obj))
        if reduce is reductions.reduce_typed_storage:  # of a tensor with attributes, or of a subclass
            made = reduce(obj)  # type: ignore[no-untyped-call]
            return made if _is_shared(made[1][0]) else None
        if reduce is reductions.reduce_storage:
            if not _is_shared(obj):
                return None
            if obj.filename is not None:
                return torch.UntypedStorage.from_file, (obj.filename, True, obj.nbytes())
        elif reduce not in (_reduce_ctype, heap.reduce_arena):
            return None
        context.set_spawning_popen(self)  # type: ignore[arg-type]
        try:
            made = reduce(obj)
        except AttributeError:  # it has memory of its own, though its type may have shared memory
            return None
        finally:
            context.set_spawning_popen(None)
        if made[0] is reductions.rebuild_storage_filename:
            obj._shared_decref()  # else each pickle would keep the name for ever
            return _open_by_name, made[1]
        return made

    def _reduce_array(self, array: Any) -> Any:
        """Return how an array is pickled that is a mapped file, a part of one, or a view of shared ctypes."""
        root, owner = array, array
        while isinstance(owner, (np.ndarray, memoryview)):
            root, owner = owner, owner.base if isinstance(owner, np.ndarray) else owner.obj
        layout = (type(array), array.shape, array.dtype, array.strides)
        if not isinstance(root, np.memmap):
            if self.reduce(owner) is None:
                return None
            return _view, (owner, array.ctypes.data - ctypes.addressof(owner), *layout)
        if root.mode == "c" or root.filename is None or not os.path.exists(root.filename):
            return None
        mode = "r" if root.mode == "r" else "r+"
        if array is root:
            order = "C" if root.flags.c_contiguous else "F"
            return np.memmap, (root.filename, root.dtype, mode, root.offset, root.shape, order)
        file = (root.filename, np.uint8, mode, root.offset, root.nbytes)
        return _view, (file, array.ctypes.data - root.ctypes.data, *layout)


def _is_shared(storage: torch.UntypedStorage) -> bool:
    return storage.device.type == "cpu" and bool(storage.is_shared())  # one on a GPU always says so


def _open_by_name(*args: Any) -> Any:
    """Return memory that torch shares by a name; it stays mapped, because torch does not count this process."""
    storage = reductions.rebuild_storage_filename(*args)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(storage))
    return storage


def _view(memory: Any, start: int, cls: type, shape: Any, dtype: Any, strides: Any) -> Any:
    buffer = np.memmap(*memory) if isinstance(memory, tuple) else memory
    return np.ndarray.__new__(cls, shape, dtype, buffer, start, strides)
