"""The names of the files and folders of a checkpoint; all but the manifest are Accelerate's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

MANIFEST: Final = "notebook_accel.json"
SCALER: Final = "scaler.pt"
OPTIMIZER: Final = "optimizer.bin"
SCHEDULER: Final = "scheduler.bin"
SAMPLER: Final = "sampler.bin"
SAFE_MODEL: Final = "model.safetensors"
MODEL: Final = "pytorch_model.bin"
DEEPSPEED: Final = "pytorch_model*/*mp_rank_*_model_states.pt"
"""The files of models that DeepSpeed trained."""

_OURS: Final = re.compile(
    r"(model(_\d+)?\.safetensors|pytorch_model(_\d+)?\.bin|(optimizer|scheduler|sampler)(_\d+)?\.bin|scaler\.pt"
    r"|(pytorch_model_fsdp|optimizer)_\d+|pytorch_model(_\d+)?"  # folders
    r"|(random_states|loader_states|custom_checkpoint)_\d+\.pkl|notebook_accel\.json)"
)
_NUMBERED: Final = re.compile(r"checkpoint_(\d+)")


def with_index(name: str, index: int) -> str:
    """Return the name of the file of one of several objects: `optimizer.bin`, `optimizer_1.bin`.

    Args:
        name: of the first object's file.
        index: of the object, from 0.
    """
    stem, dot, ending = name.partition(".")
    return name if index == 0 else f"{stem}_{index}{dot}{ending}"


def random_states(rank: int) -> str:
    """Return the name of the file with the random states of a rank."""
    return f"random_states_{rank}.pkl"


def loader_states(rank: int) -> str:
    """Return the name of the file with the states of a rank's stateful loaders, which Accelerate does not have."""
    return f"loader_states_{rank}.pkl"


def sharded_model(index: int) -> str:
    """Return the name of the folder with the shards of a model."""
    return f"pytorch_model_fsdp_{index}"


def sharded_optimizer(index: int) -> str:
    """Return the name of the folder with the shards of an optimizer's state."""
    return f"optimizer_{index}"


def custom(index: int) -> str:
    """Return the name of the file of a registered object."""
    return f"custom_checkpoint_{index}.pkl"


def is_ours(name: str) -> bool:
    """Return True for the name of a file or folder that a checkpoint is made of."""
    return _OURS.fullmatch(name) is not None


def list_files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint in its folder and in the folders there, in the order of their paths."""
    paths = sorted(folder.rglob("*"))
    return [path for path in paths if path.is_file() and is_ours(path.relative_to(folder).parts[0])]


def count(folder: Path, name: str) -> int:
    """Return how many files of a kind the folder holds.

    Args:
        folder: of the checkpoint.
        name: of the first one; the others have an index, see `with_index`.
    """
    stem, dot, ending = name.partition(".")
    pattern = re.compile(rf"{re.escape(stem)}(_\d+)?{re.escape(dot + ending)}")
    return sum(pattern.fullmatch(path.name) is not None for path in folder.iterdir())


def checkpoints(parent: Path) -> list[tuple[int, Path]]:
    """Return the automatically named checkpoints in a folder with their numbers, oldest first.

    A folder that only has such a name is none: it has neither our manifest nor random states, as all of Accelerate's.
    """
    found = [(_NUMBERED.fullmatch(path.name), path) for path in parent.glob("checkpoint_*")]
    return sorted(
        (int(match[1]), path)
        for match, path in found
        if match is not None
        if (path / MANIFEST).is_file() or any(path.glob("random_states_*.pkl"))
    )
