"""What workers take over from the notebook's process: folder, variables, random states, and lines of cells."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import process

from ... import environ
from ..job import Job
from . import cell_sources
from .random_states import RandomStates


@dataclass(frozen=True, kw_only=True)
class ParentState:
    """This process as it was at the launch. A run in the background starts workers later, when cells have changed it.

    Attributes:
        directory: the working folder; None for forks, which have it.
        variables: of the environment.
        random_states: of all generators.
        sources: lines of cells, by the name under which they were compiled; none for forks.
    """

    directory: str | None
    variables: Mapping[str, str]
    random_states: RandomStates
    sources: Mapping[str, list[str]]

    @classmethod
    def capture(cls, job: Job) -> ParentState:
        """Return this process's state, as far as a job's workers need it."""
        forked = job.start_method == "fork"
        return cls(
            directory=None if forked else find_directory(),
            variables=environ.snapshot(),
            random_states=RandomStates.capture(),
            sources={} if forked else cell_sources.collect(),
        )


def find_directory() -> str:
    """Return the working folder of this process; empty where it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def list_path() -> tuple[str, ...]:
    """Return where this process finds modules; an empty entry is its working folder, and the one that it began in.

    In a notebook that changed its folder, modules beside it were found in the first one, as workers of
    `multiprocessing` find them.
    """
    began = [process.ORIGINAL_DIR] if process.ORIGINAL_DIR else []  # type: ignore[attr-defined]
    return tuple(place for entry in sys.path for place in ([entry] if entry else ["", *began]))
