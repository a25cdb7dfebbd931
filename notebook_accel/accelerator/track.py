"""The accelerator's trackers: what is logged goes to each of them, and to the notebook."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .. import runtime
from ..handlers import ProjectConfiguration
from .base import Shared

if TYPE_CHECKING:  # trackers are imported by those who track
    from ..tracking import GeneralTracker


class TrackPart(Shared):
    """Log to trackers, in rank 0.

    Attributes:
        project_configuration: says where trackers write to.
        log_with: the trackers asked for, by name or as given.
        trackers: those of the run, since `init_trackers`; empty outside rank 0. `end_training` finishes them, and what
            is logged after it goes to them too: whether it can still be taken is up to their libraries.
    """

    project_configuration: ProjectConfiguration
    log_with: list[str | GeneralTracker]
    trackers: list[GeneralTracker]
    _unfinished: list[GeneralTracker]

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start the trackers of `log_with`; those of an earlier call are finished first.

        Args:
            project_name: what each tracker calls the project or run.
            config: hyperparameters to store.
            init_kwargs: keywords for trackers, by their names: `{"wandb": {"tags": ["first"]}}`.

        Raises:
            TypeError: `project_name` is no text.
            ValueError: `init_kwargs` names no tracker.
        """
        if not isinstance(project_name, str):
            raise TypeError(f"project_name {project_name!r} is a {type(project_name).__name__}, not a text")
        options = self._by_tracker("init_kwargs", init_kwargs)
        if not self._runtime.topology.is_main:
            return
        made = [self._make_tracker(entry, project_name, options) for entry in self.log_with]
        self._finish_trackers()
        self.trackers.clear()
        for tracker in made:
            tracker.start()
            self.trackers.append(tracker)
            self._unfinished.append(tracker)
        if config is not None:
            for tracker in self.trackers:
                tracker.store_init_configuration(config)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log values: in rank 0 to each tracker, and the numbers among them to the notebook that launched the run.

        The notebook takes those of each rank that calls this, see `Run.rank_metrics`; its charts begin with rank 0.

        Args:
            values: by name: numbers, texts, and whatever else the trackers take.
            step: the step that they belong to.
            log_kwargs: keywords for trackers' `log`, by their names.

        Raises:
            TypeError: `values` is no mapping.
            ValueError: `log_kwargs` names no tracker, or a notebook listens and `step` is no whole number.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"log takes values by name, as {{'loss': 0.5}}, not {values!r}")
        options = self._by_tracker("log_kwargs", log_kwargs)
        reporter = runtime.reporter()
        if reporter is not None and reporter.takes_metrics(values):
            from ..tracking.values import numbers_in, read_step

            if found := numbers_in(values):
                reporter.metrics(found, read_step(step))
        if not self._runtime.topology.is_main:
            return
        for tracker in self.trackers:
            # what comes after the end is to be finished too
            if not any(tracker is other for other in self._unfinished):
                self._unfinished.append(tracker)
            tracker.log(dict(values), step=step, **options.get(tracker.name, {}))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by name.

        Args:
            name: as in `log_with`.
            unwrap: return the object of the tracker's library instead.

        Returns:
            The tracker; outside rank 0, and where the accelerator has no trackers, one whose methods do nothing.

        Raises:
            ValueError: there are trackers, but none of this name.
            RuntimeError: the tracker is not started.
        """
        for tracker in self.trackers:
            if tracker.name == name:
                return getattr(tracker, "tracker") if unwrap else tracker  # noqa: B009 - not in the base's types
        names = [entry if isinstance(entry, str) else entry.name for entry in self.log_with]
        if names and name not in names:
            raise ValueError(f"the accelerator has no tracker {name!r}, only {', '.join(names)}")
        if names and self._runtime.topology.is_main:
            raise RuntimeError(f"the tracker {name!r} is not running: call init_trackers first")
        from ..tracking.base import SilentTracker

        return SilentTracker(name)

    def _make_tracker(
        self,
        entry: str | GeneralTracker,
        project_name: str,
        options: Mapping[str, Mapping[str, Any]],
    ) -> GeneralTracker:
        if not isinstance(entry, str):
            return entry
        from ..tracking import tracker_class

        kind: Any = tracker_class(entry)
        folder = [self.project_configuration.logging_dir] if kind.requires_logging_directory else []
        made: GeneralTracker = kind(project_name, *folder, **options.get(entry, {}))
        return made

    def _by_tracker(
        self, argument: str, given: Mapping[str, Mapping[str, Any]] | None
    ) -> Mapping[str, Mapping[str, Any]]:
        """Return keywords by tracker; those of a tracker that is not in use may stay, a name of none is an error."""
        if not given:
            return {}
        from ..tracking import tracker_class

        own = [entry if isinstance(entry, str) else entry.name for entry in self.log_with]
        for name in given:
            if name not in own:
                try:
                    tracker_class(str(name))
                except ValueError as error:
                    raise ValueError(f"{argument}: {error}") from None
        return {str(name): keywords for name, keywords in given.items()}

    def _finish_trackers(self) -> None:
        """Finish all trackers that are not finished yet, each of them even if one before it fails."""
        while self._unfinished:
            try:
                self._unfinished.pop(0).finish()
            except BaseException:
                self._finish_trackers()
                raise
