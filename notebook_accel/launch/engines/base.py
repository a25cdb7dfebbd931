"""What an engine is to the launcher."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...events import Event, Failure
from ...stream.record import RunRecord
from ..job import Job

Deliver = Callable[[Sequence[Event]], None]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended: values by rank, or failures with the ranks that were stopped because of them."""

    values: Mapping[int, Any] = field(default_factory=dict)
    failures: Sequence[Failure] = ()
    stopped: frozenset[int] = frozenset()


class Engine(ABC):
    """Runs jobs in one way."""

    @abstractmethod
    def run(self, job: Job, record: RunRecord, deliver: Deliver) -> Outcome:
        """Run the job to its end.

        KeyboardInterrupt passes through after all workers have ended. `deliver` takes every event as it comes.
        """
