"""What workers find besides their function: this process's folder, variables, random states and cells."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from .. import environ
from . import sources
from .job import Job
from .randomness import RandomStates


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """This process as it was at the launch: a run in the background starts its workers later, and again.

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
    def capture(cls, job: Job) -> Surroundings:
        """Look around, for a job's workers."""
        forked = job.start_method == "fork"
        return cls(
            directory=None if forked else os.getcwd(),
            variables=environ.snapshot(),
            random_states=RandomStates.capture(),
            sources={} if forked else sources.collect(),
        )
