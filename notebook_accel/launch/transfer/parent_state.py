"""What workers take over from the notebook's process: folder, variables, random states, and lines of cells."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

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
            directory=None if forked else os.getcwd(),
            variables=environ.snapshot(),
            random_states=RandomStates.capture(),
            sources={} if forked else cell_sources.collect(),
        )
