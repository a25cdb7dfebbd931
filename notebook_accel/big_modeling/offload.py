"""Weights that stay on the disk: writes them there, keeps an index of where they are, and reads them by name."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from ..checkpointing import checksums, rawio, weights
from ..checkpointing.folder import PathLike, make_token
from ..errors import CheckpointError
from ..hooks.tensors import as_device, find_owner, set_module_tensor_to_device
from ..hooks.weights import Weights
from . import mapped
from .mapped import Place

Index = Mapping[str, Mapping[str, Any]]
"""Where each weight is: `safetensors_file`, `weight_name` and `dtype`, or `dtype` and `shape` of `<name>.dat`."""

INDEX: Final = "index.json"
_CHECKSUM: Final = "notebook_accel.checksum"


def offload_weight(
    weight: torch.Tensor,
    weight_name: str,
    offload_folder: PathLike,
    index: MutableMapping[str, Any] | None = None,
) -> MutableMapping[str, Any]:
    """Write a weight to `<weight_name>.dat` in a folder, and note it in an index.

    Args:
        weight: the values.
        weight_name: its full name.
        offload_folder: the folder, made if it does not exist.
        index: gets the entry; None for a new one.

    Returns:
        The index.

    Raises:
        CheckpointError: the folder has no room or cannot be written; the file is removed then.
    """
    path = Path(offload_folder) / f"{weight_name}.dat"
    part = path.with_name(f"{path.name}.part-{make_token()}")
    values = weight.detach().to("cpu").contiguous()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb") as file:
            file.write(rawio.memory(values))
        part.replace(path)  # not written in place: the values may be pages of the old file
    except OSError as error:
        part.unlink(missing_ok=True)
        reason = "there is no room" if error.errno == errno.ENOSPC else error
        raise CheckpointError(
            f"{path} cannot be written, {weight_name!r} of shape {list(weight.shape)} needs {values.nbytes:,} "
            f"bytes: {reason}"
        ) from error
    noted: MutableMapping[str, Any] = {} if index is None else index
    noted[weight_name] = {
        "dtype": str(weight.dtype).removeprefix("torch."),
        "shape": list(weight.shape),
        _CHECKSUM: checksums.show(checksums.compute(rawio.memory(values))),
    }
    return noted


def load_offloaded_weight(weight_file: PathLike, weight_info: Mapping[str, Any]) -> torch.Tensor:
    """Return a weight that `offload_weight` wrote.

    Args:
        weight_file: the file `<name>.dat`.
        weight_info: its entry in the index, with `dtype` and `shape`.

    Raises:
        CheckpointError: the file is missing, or its size is another.
    """
    place = _dat_place(Path(weight_file), weight_info)
    found = mapped.read({"weight": place})["weight"]
    _compare(Path(weight_file).stem, place, found)
    return found


def _dat_place(path: Path, info: Mapping[str, Any]) -> Place:
    if lacking := [key for key in ("dtype", "shape") if key not in info]:
        raise CheckpointError(f"{path}: its entry in the index has no {' and no '.join(lacking)}")
    dtype = _dtype_of(info["dtype"], path)
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, though the index lists it")
    place = Place(
        path=path,
        offset=0,
        shape=tuple(info["shape"]),
        dtype=dtype,
        stamp=mapped.read_stamp(path),
        checksum=int(info[_CHECKSUM], 16) if _CHECKSUM in info else None,
    )
    if path.stat().st_size != place.nbytes:
        raise CheckpointError(
            f"{path} has {path.stat().st_size} bytes, and {list(place.shape)} of {dtype} needs {place.nbytes}"
        )
    return place


def _dtype_of(name: Any, path: Path) -> torch.dtype:
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"{path}: dtype {name!r} in the index is none of torch")
    return found


def save_offload_index(index: Index, offload_folder: PathLike) -> None:
    """Add an index to that of a folder. An empty index is not written.

    Args:
        index: the entries.
        offload_folder: the folder, made if it does not exist.
    """
    if not index:
        return
    path = Path(offload_folder) / INDEX
    known = read_index(offload_folder) if path.is_file() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**known, **index}, indent=2), encoding="utf-8")


def read_index(folder: PathLike) -> dict[str, dict[str, Any]]:
    """Return the index in a folder.

    Args:
        folder: of `offload_state_dict`.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    path = Path(folder) / INDEX
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): dict(info) for name, info in content.items()}
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: {folder} holds no offloaded weights") from None
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no index of offloaded weights: {error}") from error


def offload_state_dict(save_dir: PathLike, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write weights to a folder: a file for each, and an index.

    Args:
        save_dir: the folder, made if it does not exist.
        state_dict: the weights by name.

    Raises:
        CheckpointError: there is no room. What was written is removed then; if the system says before that there is no
            room, nothing is written.
        ValueError: `save_dir` is a file.
    """
    folder = Path(save_dir)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, weights are written to a folder")
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    needed = sum(tensor.nbytes for tensor in state_dict.values())
    free = shutil.disk_usage(folder).free
    written: dict[str, Any] = {}
    try:
        if needed > free:
            largest = max(state_dict, key=lambda name: state_dict[name].nbytes)
            raise CheckpointError(
                f"{folder} has room for {free:,} bytes, and the weights need {needed:,}, most of them {largest!r} "
                f"of shape {list(state_dict[largest].shape)}"
            )
        for name, tensor in state_dict.items():
            offload_weight(tensor, name, folder, written)
        save_offload_index(written, folder)
    except BaseException:
        for name in written:
            (folder / f"{name}.dat").unlink(missing_ok=True)
        if new:
            shutil.rmtree(folder)
        raise


def load_offloaded_weights(model: nn.Module, index: Index, offload_folder: PathLike) -> None:
    """Put weights of a folder into a model, each on the device and in the dtype that it has there.

    Args:
        model: gets them; tensors on the meta device come to the CPU.
        index: of the weights in the folder.
        offload_folder: of `offload_state_dict`.
    """
    loader = OffloadedWeightsLoader(save_folder=offload_folder, index=index)
    for name in index:
        owner, key = find_owner(model, name)
        old: Any = owner._parameters.get(key) if key in owner._parameters else owner._buffers[key]
        device = torch.device("cpu") if old.is_meta else old.device
        set_module_tensor_to_device(model, name, device, value=loader.get_lasting(name))


class OffloadedWeightsLoader(Weights):
    """A mapping of weights in memory and on the disk; those on the disk are read on access.

    Args:
        state_dict: those in memory.
        save_folder: of `offload_state_dict`, with the index of those on the disk.
        index: of weights on the disk, instead of the folder's.
        device: where weights of the disk are returned, by default on the CPU.

    Raises:
        ValueError: none of the first three is given.
        CheckpointError: a file is missing, damaged, or does not have what the index says.
    """

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        save_folder: PathLike | None = None,
        index: Index | None = None,
        device: int | str | torch.device | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ValueError("OffloadedWeightsLoader needs a state_dict, a save_folder or an index")
        self.state_dict = dict(state_dict or {})
        self.save_folder = save_folder
        self.index: dict[str, Mapping[str, Any]] = dict(index or {})
        if index is None and save_folder is not None:
            self.index = dict(read_index(save_folder))
        self.device = device
        self._places, self._dtypes = self._look_up()
        self._verified: set[str] = set()
        self._rooms = mapped.Rooms()
        self._files: dict[tuple[str, ...], set[tuple[str, tuple[int, int] | None]]] = {}
        self.all_keys = [*self.state_dict, *(name for name in self.index if name not in self.state_dict)]

    def _look_up(self) -> tuple[dict[str, Place], dict[str, torch.dtype]]:
        headers: dict[Path, tuple[weights.Header, tuple[int, int]]] = {}
        places: dict[str, Place] = {}
        dtypes: dict[str, torch.dtype] = {}
        for name, info in self.index.items():
            if name in self.state_dict:
                continue
            file = info.get("safetensors_file")
            if file is None:
                places[name] = _dat_place(Path(str(self.save_folder)) / f"{name}.dat", info)
                continue
            path = Path(file)
            if path not in headers:
                headers[path] = weights.read_header(path), mapped.read_stamp(path)
            header, stamp = headers[path]
            entry = header.entries.get(key := info.get("weight_name", name))
            if entry is None:
                raise CheckpointError(f"{path} has no weights for {key!r}")
            places[name] = Place(
                path=path,
                offset=entry.offset,
                shape=entry.shape,
                dtype=entry.dtype,
                stamp=stamp,
                checksum=entry.checksum,
            )
            if "dtype" in info:
                dtypes[name] = _dtype_of(info["dtype"], path)
        return places, dtypes

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.get_many([key])[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)

    def get_many(
        self, names: Sequence[str], *, aligned: bool = True, beside: bool = False
    ) -> dict[str, torch.Tensor]:
        places = {name: self._places[name] for name in names if name not in self.state_dict}
        found = mapped.read(places, aligned=aligned, beside=beside, rooms=self._rooms)
        self._verify(found)
        for name, tensor in found.items():
            made = tensor.to(self._dtypes[name]) if name in self._dtypes else tensor
            found[name] = made if self.device is None else made.to(as_device(self.device))
        return {name: self.state_dict[name] if name in self.state_dict else found[name] for name in names}

    def _verify(self, found: Mapping[str, torch.Tensor]) -> None:
        """Compare the checksums of values that are read for the first time."""
        for name, tensor in found.items():
            if name not in self._verified:
                _compare(name, self._places[name], tensor)
                self._verified.add(name)

    def is_near(self, names: Sequence[str]) -> bool:
        return mapped.is_cached(self._places[name] for name in names if name not in self.state_dict)

    def check(self, names: Sequence[str]) -> None:
        key = tuple(names)
        if (files := self._files.get(key)) is None:  # modules ask at each forward
            places = [self._places[name] for name in names if name not in self.state_dict]
            files = self._files[key] = {(str(place.path), place.stamp) for place in places}
        mapped.check(files)

    def get_lasting(self, name: str) -> torch.Tensor:
        if name in self.state_dict:
            return self.state_dict[name]
        lasting = self[name].clone()
        self.check([name])
        return lasting


def _compare(name: str, place: Place, tensor: torch.Tensor) -> None:
    if place.checksum is None:
        return
    found = checksums.compute(rawio.memory(tensor))
    if found != place.checksum:
        raise CheckpointError(
            f"{place.path}: the values of {name!r} are not those that were written (checksum {checksums.show(found)}, "
            f"written with {checksums.show(place.checksum)}): the file is damaged, load another checkpoint"
        )


def extract_submodules_state_dict(
    state_dict: Mapping[str, torch.Tensor], submodule_names: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Return the entries of these modules, with their full names.

    Args:
        state_dict: tensors by name.
        submodule_names: names of modules, or of single tensors.
    """
    found: dict[str, torch.Tensor] = {}
    for module in submodule_names:
        found |= {
            name: tensor
            for name, tensor in state_dict.items()
            if name == module or name.startswith(f"{module}.")
        }
    return found
