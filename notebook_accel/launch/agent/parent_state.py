"""What workers take over from the notebook's process: folder, variables, random states, and lines of cells."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from multiprocessing import process

from ... import environ
from .. import children
from ..job import Job
from ..transfer import cell_sources
from ..transfer.settings import Settings
from .modules import Modules
from .orders import ImportOrder, Limits, find_directory


@dataclass(frozen=True, kw_only=True)
class ParentState:
    """This process as it was at the launch. A run in the background starts workers later, when cells have changed it.

    Attributes:
        directory: the working folder; None for forks, which have it.
        variables: of the environment.
        settings: of Python and torch, with the random states.
        sources: lines of cells, by the name under which they were compiled; none for forks.
        limits: of the process.
        imports: the modules that it has, and where they are found.
        with_ipython: whether it has IPython.
        child_start_method: see `worker.main.WorkerSpec`.
    """

    directory: str | None
    variables: Mapping[str, str]
    settings: Settings
    sources: Mapping[str, list[str]]
    limits: Limits
    imports: ImportOrder
    with_ipython: bool
    child_start_method: str | None

    @classmethod
    def capture(cls, job: Job, more: Iterable[str] = ()) -> ParentState:
        """Return this process's state, as far as a job's workers need it.

        Args:
            job: what they run.
            more: modules that they will import.
        """
        forked = job.start_method == "fork"
        variables = environ.snapshot()
        modules = Modules(versions={}) if forked else Modules.capture(more)
        return cls(
            directory=None if forked else find_directory(),
            variables=variables,
            settings=Settings.capture(),
            sources={} if forked else cell_sources.collect(),
            limits=Limits.capture(),
            imports=ImportOrder(modules=modules, environment=variables, path=list_path()),
            with_ipython="IPython" in sys.modules,
            child_start_method=children.choose_start_method(),
        )


def list_path() -> tuple[str, ...]:
    """Return where this process finds modules; an empty entry is its working folder, and the one that it began in.

    In a notebook that changed its folder, modules beside it were found in the first one, as workers of
    `multiprocessing` find them.
    """
    began = [process.ORIGINAL_DIR] if process.ORIGINAL_DIR else []  # type: ignore[attr-defined]
    return tuple(place for entry in sys.path for place in ([entry] if entry else ["", *began]))
