"""Which engines there are: our own, and those that installed packages bring."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

from ... import devices, tpu
from .. import chips
from .base import Engine

if TYPE_CHECKING:
    from ..job import Job

GROUP: Final = "notebook_accel.engines"
"""Entry points of this group name engines: classes of `Engine` that are made without arguments."""
AUTO: Final = "auto"
BUILT_IN: Final[Mapping[str, str]] = {
    "inprocess": "inprocess:InProcessEngine",
    "elastic": "elastic:ElasticEngine",
    "ray": "ray.engine:RayEngine",
    "xla": "xla:XlaEngine",
}


def names() -> list[str]:
    """Return the names of all engines."""
    return sorted({*BUILT_IN, *(entry.name for entry in metadata.entry_points(group=GROUP))})


def engine_for(job: Job) -> Engine:
    """Return the engine that a job asks for, or that suits it.

    Raises:
        ValueError: there is none of that name, or it cannot be had; the message says why.
        TypeError: it is neither a name nor an engine.
    """
    asked = job.engine
    if isinstance(asked, Engine):
        return asked
    if not isinstance(asked, str):
        raise TypeError(f"engine={asked!r}: the name of an engine is needed, or an Engine")
    return named(_suited(job) if asked == AUTO else asked)


def named(name: str) -> Engine:
    """Return an engine by its name; ValueError as `engine_for`."""
    if name in BUILT_IN:
        module, _, kind = BUILT_IN[name].partition(":")
        made: Any = getattr(importlib.import_module(f".{module}", __package__), kind)
        return made()  # type: ignore[no-any-return]
    found = {entry.name: entry for entry in metadata.entry_points(group=GROUP)}
    if name not in found:
        known = [AUTO, *names()]
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"engine={name!r}: choose among {', '.join(map(repr, known))}{hint}")
    try:
        engine = found[name].load()()
    except Exception as error:
        raise ValueError(f"engine={name!r}: {found[name].value} cannot be used: {error!r}") from error
    if not isinstance(engine, Engine):
        raise ValueError(f"engine={name!r}: {found[name].value} gives no Engine, but {engine!r}")
    return engine


def _suited(job: Job) -> str:
    if job.device_kind is not devices.XLA:
        return "elastic" if job.needs_workers else "inprocess"
    if job.tpu_mode == "spmd":
        here = not chips.is_started() or chips.is_sharding()
    else:
        here = tpu.chips() == 1  # of several this process would take all
    return "inprocess" if here and not job.needs_workers else "xla"
