"""DVCLive."""

from __future__ import annotations

from typing import Any

from .base import GeneralTracker, on_main_process
from .values import plain, warn_dropped


class DVCLiveTracker(GeneralTracker):
    """Logs with DVCLive; one call of `log` is one step.

    Args:
        run_name: not used. `kwargs` say where to write, as in `init_kwargs={"dvclive": {"dir": "folder"}}`.
        live: a `dvclive.Live` to use instead of a new one.
        kwargs: for `dvclive.Live`.
    """

    name = "dvclive"
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self.live = live
        self.init_kwargs = kwargs

    @on_main_process
    def start(self) -> None:
        """Make the `dvclive.Live`, if none was given."""
        from dvclive import Live

        if self.live is None:
            self.live = Live(**self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The `dvclive.Live`."""
        return self.live

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters, which may be nested."""
        self.live.log_params(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add values and end the step.

        Args:
            values: what DVCLive takes as a metric, by name; anything else is left out with a warning.
            step: number of the step, None for the next one.
            kwargs: for `Live.log_metric`.
        """
        from dvclive.plots import Metric

        if step is not None:
            self.live.step = step
        for name, value in values.items():
            if Metric.could_log(known := plain(value)):  # plain: it knows no tensors
                self.live.log_metric(name, known, **kwargs)
            else:
                warn_dropped(self.name, name, value)
        self.live.next_step()

    @on_main_process
    def finish(self) -> None:
        """Write the last step and the run's summary."""
        self.live.end()
