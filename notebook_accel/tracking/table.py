"""Which trackers there are: a row for each adapter here, and those that installed packages bring."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final

from .. import probes
from ..choices import Choice
from .base import GeneralTracker, check_tracker_class

GROUP: Final = "notebook_accel.trackers"
"""Entry points of this group name trackers: subclasses of `GeneralTracker`."""
ALL: Final = "all"


class LoggerType(Choice):
    """The names of trackers that Accelerate has too; `all` stands for every tracker that is installed."""

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """The row of a tracker whose adapter is in this package."""

    path: str
    """Where its class is: `module:Class`, the module below `notebook_accel.tracking`."""
    libraries: tuple[str, ...]
    """Modules that it can work with, by their import names; one of them is enough."""
    below: str | None = None
    """The first version of the library that does not work, None where all do."""

    @property
    def is_installed(self) -> bool:
        """True if one of the libraries is there, in a version that works."""
        return any(
            probes.is_available(library) and not (self.below and probes.at_least(library, self.below))
            for library in self.libraries
        )

    @property
    def requirement(self) -> str:
        """What pip installs for it."""
        return f"'{self.libraries[0]}<{self.below}'" if self.below else self.libraries[0]


BUILT_IN: Final[Mapping[str, Adapter]] = {
    "aim": Adapter(path="aim:AimTracker", libraries=("aim",), below="4"),
    "tensorboard": Adapter(path="tensorboard:TensorBoardTracker", libraries=("tensorboard", "tensorboardX")),
    "wandb": Adapter(path="runs:WandBTracker", libraries=("wandb",)),
    "trackio": Adapter(path="runs:TrackioTracker", libraries=("trackio",)),
    "comet_ml": Adapter(path="comet:CometMLTracker", libraries=("comet_ml",)),
    "mlflow": Adapter(path="mlflow:MLflowTracker", libraries=("mlflow",)),
    "clearml": Adapter(path="clearml:ClearMLTracker", libraries=("clearml",)),
    "dvclive": Adapter(path="dvclive:DVCLiveTracker", libraries=("dvclive",)),
    "swanlab": Adapter(path="runs:SwanLabTracker", libraries=("swanlab",)),
}


def names() -> list[str]:
    """Return the names of all trackers: adapters here, registered classes, and those of installed packages."""
    return list(dict.fromkeys([*BUILT_IN, *GeneralTracker._registered, *_entry_points()]))


def installed_names() -> list[str]:
    """Return what `all` stands for: the trackers whose library is installed, those of other packages included."""
    here = [name for name, adapter in BUILT_IN.items() if adapter.is_installed]
    return list(dict.fromkeys([*here, *_entry_points()]))


def tracker_class(name: str) -> type[GeneralTracker]:
    """Return the class that `log_with` means by a name.

    A class that `register_tracker_class` has registered comes first, then the adapters here, then the entry points
    of installed packages.

    Args:
        name: a tracker's name; `all` is none.

    Returns:
        The class. Its library may still be missing.

    Raises:
        ValueError: no tracker has this name, or a package offers something under it that cannot be used.
    """
    name = str(name)
    if name in GeneralTracker._registered:
        return GeneralTracker._registered[name]
    if name in BUILT_IN:
        module, _, kind = BUILT_IN[name].path.partition(":")
        found: Any = getattr(importlib.import_module(f".{module}", __package__), kind)
        return found  # type: ignore[no-any-return]
    entry = _entry_points().get(name)
    if entry is None:
        known = [ALL, *names()]
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"tracker {name!r} is unknown, choose among {', '.join(known)}{hint} (a class of your own is known "
            f"after register_tracker_class in this process, or by an entry point of its package)"
        )
    return _load(entry)


def _entry_points() -> dict[str, metadata.EntryPoint]:
    return {entry.name: entry for entry in metadata.entry_points(group=GROUP)}


def _load(entry: metadata.EntryPoint) -> type[GeneralTracker]:
    package = f"the package {entry.dist.name} {entry.dist.version}" if entry.dist else "an installed package"
    origin = f"tracker {entry.name!r}: {package} offers {entry.value}"
    try:
        found = entry.load()
    except Exception as error:
        raise ValueError(f"{origin}, which cannot be imported: {error!r}") from error
    try:
        kind = check_tracker_class(found)
    except ValueError as error:
        raise ValueError(f"{origin}, which is no tracker: {error}") from None
    if kind.name != entry.name:
        raise ValueError(f"{origin}, whose name is {kind.name!r}: the entry point needs the same name")
    return kind
