"""Files of torch.save: written without checksums nobody reads, checked by their structure, read into place."""

from __future__ import annotations

import codecs
import os
import pickle
import sys
import threading
import zipfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from ..errors import CheckpointError
from . import checksums, rawio

Keep = Callable[[torch.Tensor], torch.Tensor]
"""Gets a tensor with its values, and returns what is kept of it."""

_one_writer: Final = threading.Lock()  # up to torch 2.8 its option for checksums is one for all threads


def _begin_anew() -> None:
    """In a fork: where a thread was writing, it is not there, and nobody else gives back lock and option."""
    if _one_writer.locked():
        _one_writer._at_fork_reinit()  # type: ignore[attr-defined]
        torch.serialization.set_crc32_options(True)  # torch's default


os.register_at_fork(after_in_child=_begin_anew)


def write(path: Path, obj: Any, *, cached: bool = True) -> checksums.Written:
    """Write an object with torch.save; the file is on the disk afterwards.

    Args:
        path: of the file.
        obj: any object that can be pickled.
        cached: see `rawio.create`.

    Returns:
        The size, and the checksums as `checksums.describe` has them.
    """
    blocks = checksums.Blocks()
    with _one_writer, rawio.create(path, cached=cached, on_block=blocks.add) as file:
        before = torch.serialization.get_crc32_options()
        # torch.load never compares them, and computing them takes most of the time
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(obj, file)
        finally:
            torch.serialization.set_crc32_options(before)
    return checksums.Written(blocks.size, blocks.text)


_OWN_OPTIONS: Final = frozenset(("map_location", "mmap", "weights_only"))
"""Of `torch.load`, as this package gives them."""


def load(f: Any, **options: Any) -> Any:
    """Return the object in a file of torch.save.

    Args:
        f: a path or an open file.
        options: arguments of `torch.load`; `weights_only` is True by default.
    """
    with torch.serialization.safe_globals(_numpy_names()):
        return torch.load(f, **{"weights_only": True} | options)


def read(path: Path, **options: Any) -> Any:
    """Return the object in a file of torch.save, on the CPU.

    Args:
        path: of the file.
        options: arguments of `torch.load`; `weights_only` is True by default.

    Raises:
        CheckpointError: the file is missing, cut off, or not of torch.save.
    """
    try:
        _check_growth(path)
        return load(path, **{"map_location": "cpu"} | options)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is cut off, or holds objects that weights_only=True refuses: {_reason(error)}"
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # unpickling damaged bytes raises anything
        if isinstance(error, TypeError) and options.keys() - _OWN_OPTIONS:
            raise  # torch does not know an option of the user's
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path} is cut off or no file of torch.save: {reason}") from error


def _reason(error: pickle.UnpicklingError) -> str:
    """Return what was refused, without torch's advice to trust the file."""
    told = str(error).rpartition("WeightsUnpickler error:")[2]
    return next((line.strip() for line in told.splitlines() if line.strip()), type(error).__name__)


class Outline:
    """The object in a file with tensors that have no values yet, so that it can be checked before it is read.

    Attributes:
        content: the object; its tensors are on the meta device where the file allows it.
    """

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        self._lazy = not options and sys.byteorder == "little" and _is_whole_zip(path)
        if self._lazy:
            try:
                self.content = _read_outline(path)
                size = path.stat().st_size
                self._lazy = all(_is_placed(tensor, size) for tensor in tensors_in(self.content))
            except (
                CheckpointError
            ):  # the meta device has no quantized tensors, for example; or the file is damaged, see below
                self._lazy = False
        if not self._lazy:
            self.content = read(path, **options)

    def fill(
        self,
        choose: Callable[[tuple[Any, ...], torch.Tensor], torch.Tensor | Keep | None],
        only: Collection[Any] | None = None,
    ) -> Any:
        """Return the object with values.

        Args:
            choose: called with the path and the empty tensor. It returns a contiguous CPU tensor of the same shape
                and dtype to read into; None for a new one; or a function that gets the values and returns what is
                kept of them. Only one such tensor is whole in memory at a time.
            only: keys of the entries to read and return, where the object is a dict; None for all.
        """
        content = (
            self.content
            if only is None
            else {name: item for name, item in self.content.items() if name in only}
        )
        if not self._lazy:
            return replace_tensors(content, lambda path, tensor: _keep(choose(path, tensor), tensor))
        pieces: dict[int, rawio.Piece] = {}
        filled: dict[int, torch.Tensor] = {}

        def place(path: tuple[Any, ...], tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in filled:
                return filled[id(tensor)]
            storage: Any = tensor.untyped_storage()
            offset = int(storage._checkpoint_offset)
            chosen = choose(path, tensor)
            if callable(chosen):
                whole = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu")
                rawio.read_at(self.path, [(offset, whole)])
                target = chosen(_view(tensor, whole))
            elif chosen is not None and _is_whole(tensor):
                target = chosen
                pieces[id(tensor)] = (offset, target)
            else:
                if offset not in wholes:
                    wholes[offset] = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu")
                    pieces[-offset - 1] = (offset, wholes[offset])
                target = _view(tensor, wholes[offset])
            filled[id(tensor)] = target
            return target

        wholes: dict[int, torch.Tensor] = {}
        result = replace_tensors(content, place)
        rawio.read_at(self.path, list(pieces.values()))
        return result


def replace_tensors(
    tree: Any, change: Callable[[tuple[Any, ...], torch.Tensor], Any], path: tuple[Any, ...] = ()
) -> Any:
    """Return a copy of nested dicts, lists and tuples with other tensors.

    Args:
        tree: the nested data.
        change: called as `change(path, tensor)`; returns what replaces the tensor.
        path: keys and indices that lead to `tree`.
    """
    if isinstance(tree, torch.Tensor):
        return change(path, tree)
    if isinstance(tree, dict):
        items = {key: replace_tensors(value, change, (*path, key)) for key, value in tree.items()}
        if type(tree) is dict:
            return items
        copy = tree.copy()  # an OrderedDict, a Counter
        copy.update(items) if not hasattr(copy, "most_common") else dict.update(copy, items)
        return copy
    if isinstance(tree, (list, tuple)):
        values = [replace_tensors(value, change, (*path, index)) for index, value in enumerate(tree)]
        if type(tree) in (list, tuple):
            return type(tree)(values)
        return type(tree)(*values) if hasattr(tree, "_fields") else tree
    return tree


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of nested dicts, lists and tuples."""
    found: list[torch.Tensor] = []
    replace_tensors(tree, lambda path, tensor: found.append(tensor))
    return found


def names_in(path: Path, start: int, stop: int) -> list[str]:
    """Return the names of the tensors that have values between two bytes of a file, where its outline can be read."""
    found: list[str] = []

    def look(where: tuple[Any, ...], tensor: torch.Tensor) -> None:
        storage: Any = tensor.untyped_storage()
        offset = getattr(storage, "_checkpoint_offset", None)
        if offset is not None and offset < stop and offset + storage.nbytes() > start:
            found.append(".".join(map(str, where)))

    try:
        replace_tensors(_read_outline(path), look)
    except CheckpointError:  # the damage hides them, or they are of a kind without outlines
        return []
    return found


def _read_outline(path: Path) -> Any:
    """Return the object in a file, its tensors on the meta device; their storages know their places in the file.

    Raises:
        CheckpointError: the file is damaged, or of a kind without outlines.
    """
    content = read(path, map_location="meta")
    tensors = tensors_in(content)
    if not all(type(tensor) is torch.Tensor and tensor.layout is torch.strided for tensor in tensors):
        return content  # no outline is made of others
    storages: list[Any] = [tensor.untyped_storage() for tensor in tensors]
    if all(getattr(storage, "_checkpoint_offset", None) is not None for storage in storages):
        return content
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():  # in torch 2.8 only these tell their places, and not their right sizes
        placed = tensors_in(read(path, map_location=None))
    for storage, tensor in zip(storages, placed, strict=True):
        storage._checkpoint_offset = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    return content


def _is_placed(tensor: torch.Tensor, size: int) -> bool:
    """Return True for a plain tensor whose place in the file, of so many bytes, is known."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    if tensor.is_conj() or tensor.is_neg():  # the values in the file are not the final ones
        return False
    storage: Any = tensor.untyped_storage()
    offset = getattr(storage, "_checkpoint_offset", None)
    return offset is not None and offset + storage.nbytes() <= size


def _keep(chosen: torch.Tensor | Keep | None, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if chosen is None or isinstance(chosen, torch.Tensor) else chosen(tensor)


def _view(like: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Return a tensor that lies in this memory as the other one does in its own."""
    made = torch.empty(0, dtype=like.dtype, device="cpu")
    made.set_(memory.untyped_storage(), like.storage_offset(), like.shape, like.stride())
    return made


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


def _is_whole_zip(path: Path) -> bool:
    """Return True for a zip file all whose entries lie within it."""
    entries = _list_entries(path)
    return bool(entries) and all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)


def _check_growth(path: Path) -> None:
    """Raise CheckpointError where a zip file says that it holds more than it has: its entries are compressed."""
    held, size = sum(entry.file_size for entry in _list_entries(path)), path.stat().st_size
    if held > size:
        raise CheckpointError(
            f"{path} has {size:,} bytes and says that it holds {held:,}: it is compressed or made up, and torch.save "
            "compresses nothing"
        )


def _list_entries(path: Path) -> list[zipfile.ZipInfo]:
    """Return the entries of a zip file, none of another file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.infolist()
    except Exception:  # reading damaged bytes raises anything
        return []


def _numpy_names() -> list[Any]:
    """Return what NumPy's random state is made of, for `weights_only`."""
    # releases have these two functions in other modules
    makers = [value.__reduce__()[0] for value in (np.empty(0), np.float64(0))]
    kinds = [kind for name, kind in vars(np.dtypes).items() if name.endswith("DType")]
    kinds.remove(np.dtypes.ObjectDType)  # arrays of objects stay refused
    return [*makers, np.ndarray, np.dtype, codecs.encode, *kinds]
