"""Returned values as data only, for nodes that do not know each other: written and read by torch.

`torch.load(weights_only=True)` runs nothing that a pickle names but what torch knows as safe; numpy's arrays and frozen
sets are added here.
"""

from __future__ import annotations

import io
import pickle
import re
import types
import zipfile
from typing import Any, Final

import numpy as np
import torch

from ...errors import ShipError
from ...events import Buffer
from ...trust.plain import MalformedError
from ...trust.secret import HOW

_ARRAY_DTYPE: Final = re.compile(r"[<>|=][biufcSUMm]\d{1,9}(\[\d{0,9}[a-zA-Z]{1,2}\])?", re.ASCII)
_DATA: Final = "(numbers, texts, tensors, arrays, and lists, tuples, dicts and sets of them)"


def pack_plain(value: Any, limit: float) -> Buffer:
    """Return a value as bytes.

    Args:
        value: what a rank returned.
        limit: how many they may be.

    Raises:
        ShipError: it has something that is no data, or is too large; the message names that and the secret.
    """
    file = io.BytesIO()
    try:
        torch.save(value, file, pickle_module=_PICKLING)
        file.seek(0)
        with torch.serialization.safe_globals(_SAFE):
            foreign = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        problem = f"it has a {sorted(foreign)[0]}" if foreign else ""
    except Exception as error:  # whatever says that it cannot be pickled
        problem = f"{type(error).__name__}: {error}"
    if problem:
        raise ShipError(
            f"the returned value cannot be sent to the other nodes: {problem}, and nodes without a secret "
            f"exchange data only {_DATA}. Return such data, or {HOW}."
        )
    data = file.getbuffer()
    if data.nbytes > limit:
        raise ShipError(
            f"the returned value has {data.nbytes / 2**30:.1f} GiB, and nodes without a secret take "
            f"{limit / 2**30:g} GiB at most from each other: {HOW}"
        )
    return data


def unpack_plain(data: Buffer) -> Any:
    """Make a value again.

    Args:
        data: what `pack_plain` returned, or what somebody made up.

    Raises:
        MalformedError: it is no value.
    """
    file = io.BytesIO(data)
    try:
        with zipfile.ZipFile(file) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("what is compressed may have any size")
        file.seek(0)
        with torch.serialization.safe_globals(_SAFE):
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # what is made up has no end of ways to fail
        raise MalformedError(f"a returned value cannot be read: {error}") from None


class _Pickler(pickle.Pickler):
    """Writes arrays of numpy as tensors of their bytes."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is frozenset:
            return frozenset, (list(value),)
        if type(value) is np.ndarray or isinstance(value, np.generic):
            array = np.ascontiguousarray(value)
            if _ARRAY_DTYPE.fullmatch(array.dtype.str):
                content = torch.from_numpy(array.reshape(-1).view(np.uint8).copy())
                is_array = type(value) is np.ndarray
                return _make_array, (array.dtype.str, tuple(np.shape(value)), is_array, content)
        return NotImplemented


def _make_array(dtype: str, shape: tuple[int, ...], is_array: bool, content: torch.Tensor) -> Any:
    if not _ARRAY_DTYPE.fullmatch(dtype):
        raise ValueError(f"{dtype!r} is no dtype")
    array = content.numpy().view(dtype).reshape(shape)
    return array if is_array else array[()]


_SAFE: Final[list[Any]] = [bytes, frozenset, _make_array]
_PICKLING: Final[Any] = types.SimpleNamespace(__name__="pickle", Pickler=_Pickler)
