"""Finds the tensors of a model: in code, in a checkpoint's headers, in a config, or by a hub id."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import torch

from ..checkpointing import models, shards
from ..errors import CheckpointError
from . import building, sizes
from .sizes import Inventory, Part

_IMPORT_PATH: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_HUB_ID: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")
_ENDINGS: Final = (".safetensors", ".bin", ".pt", ".pth")
_NESTED: Final = ("state_dict", "model", "module")
_BY_NAME: Final = (
    "The checkpoint says neither which blocks stay whole nor what is a buffer: the largest layer is the largest "
    "module by its tensors' names, and every floating point tensor counts as trained."
)

Library = Literal["transformers", "timm"]


def find(
    model: str,
    *,
    library: Library | None = None,
    trust_remote_code: bool = False,
    arguments: building.Arguments = (),
) -> Inventory:
    """Return the tensors of a model.

    Args:
        model: an import path `package.module:name`, a file of weights, a folder with weights or a `config.json`,
            or a hub id.
        library: the library that the name or id belongs to; None for transformers.
        trust_remote_code: let transformers run code that comes with a config.
        arguments: for the class or function of an import path.

    Raises:
        ValueError: it is none of these, or cannot be built.
        CheckpointError: a file is damaged.
    """
    path = Path(model).expanduser()
    if arguments and (path.exists() or not _IMPORT_PATH.fullmatch(model)):
        raise ValueError(f"arguments are for import paths, package.module:name, and {model!r} is none")
    if library == "timm":
        return sizes.list_tensors(building.from_timm(model), f"timm's {model}")
    if path.exists():
        return _in_folder(path, trust_remote_code) if path.is_dir() else _in_file(path, trust_remote_code)
    if _IMPORT_PATH.fullmatch(model):
        return sizes.list_tensors(building.from_import_path(model, arguments), model)
    if path.suffix in _ENDINGS or not _HUB_ID.fullmatch(model):
        raise ValueError(
            f"{model} is no file and no folder; models are named package.module:name, by a file, or by a hub id"
        )
    built = building.from_transformers(model, trust_remote_code=trust_remote_code)
    return sizes.list_tensors(built, f"the config of {model}")


def _in_file(path: Path, trust_remote_code: bool) -> Inventory:
    if path.suffix in _ENDINGS:
        return _of_weights([path], str(path))
    if path.suffix != ".json":
        raise ValueError(f"{path} is no file of weights: their names end with {', '.join(_ENDINGS)}")
    if path.name.endswith(".index.json"):
        return _of_weights(shards.find_files(path), str(path))
    return _of_config(path, trust_remote_code)


def _in_folder(path: Path, trust_remote_code: bool) -> Inventory:
    """List the tensors of a folder: by its config, which knows the blocks that stay whole, or else by its weights."""
    config = path / "config.json"
    notes = []
    if config.is_file():
        try:
            return _of_config(config, trust_remote_code)
        except ValueError as error:
            if not (files := _weights_in(path)):
                raise
            notes.append(f"config.json was not used: {error}.")
    else:
        files = _weights_in(path)
    if not files:
        raise ValueError(
            f"{path} holds neither weights (one file that ends with {', '.join(_ENDINGS)}, or an index) nor config.json"
        )
    return _of_weights(files, str(path), notes)


def _weights_in(path: Path) -> list[Path]:
    try:
        return shards.find_files(path)
    except ValueError:  # no usual name
        files = [file for file in path.iterdir() if file.suffix in _ENDINGS and file.is_file()]
        if len(files) > 1:
            listed = ", ".join(sorted(file.name for file in files))
            raise ValueError(f"{path} holds several files of weights, name one: {listed}") from None
        return files


def _of_config(path: Path, trust_remote_code: bool) -> Inventory:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict) or not ("model_type" in content or "auto_map" in content):
        raise ValueError(f"{path} is no config of transformers: it has no model_type")
    where = path.parent if path.name == "config.json" else path  # the folder has the code that comes with it
    model = building.from_transformers(str(where), trust_remote_code=trust_remote_code)
    return sizes.list_tensors(model, str(path))


def _of_weights(files: list[Path], origin: str, notes: list[str] | None = None) -> Inventory:
    parts = {part.name: part for file in files for part in _parts(file)}
    if not parts:
        raise ValueError(f"{origin} holds no tensors")
    return sizes.list_named_tensors(parts.values(), origin, [*(notes or []), _BY_NAME])


def _parts(path: Path) -> Iterator[Part]:
    source = models.open_source(path)
    if source.header is not None:
        for name, entry in source.header.entries.items():
            count = torch.Size(entry.shape).numel()
            yield Part(name=name, count=count, dtype=entry.dtype, is_trained=entry.dtype.is_floating_point)
        return
    assert source.outline is not None
    seen = set[Any]()
    for name, tensor in _collect_tensors(path, source.outline.content).items():
        storage: Any = tensor.untyped_storage()
        place = (
            getattr(storage, "_checkpoint_offset", None) or storage.data_ptr()
        )  # on meta all have address 0
        view = (place, tensor.storage_offset(), tensor.shape, tensor.stride())
        if view not in seen:
            trained = tensor.is_floating_point()
            yield Part(name=name, count=tensor.numel(), dtype=tensor.dtype, is_trained=trained)
        seen.add(view)


def _collect_tensors(path: Path, content: dict[Any, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors by name, of a file that holds a model alone or one among other things."""
    for part in (content, *(content.get(name) for name in _NESTED)):
        if isinstance(part, dict):
            found = {str(name): item for name, item in part.items() if isinstance(item, torch.Tensor)}
            if found:
                return found
    raise CheckpointError(
        f"{path} holds no weights by name, neither itself nor below {' or '.join(map(repr, _NESTED))}"
    )
