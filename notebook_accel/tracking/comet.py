"""Comet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import GeneralTracker, on_main_process
from .values import as_number, numbers_in, warn_dropped


class CometMLTracker(GeneralTracker):
    """Logs to an experiment of Comet; the API key is in Comet's own configuration.

    Args:
        run_name: name of the project.
        kwargs: for `comet_ml.start`, or `comet_ml.Experiment` in versions without it.
    """

    name = "comet_ml"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs

    @on_main_process
    def start(self) -> None:
        """Open the experiment."""
        import comet_ml

        begin = comet_ml.start if hasattr(comet_ml, "start") else comet_ml.Experiment
        self.writer = begin(project_name=self.run_name, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """Comet's experiment."""
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters."""
        self.writer.log_parameters(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add values.

        Args:
            values: numbers, texts and dicts of numbers by name; anything else is left out with a warning.
            step: the step that they belong to.
            kwargs: for `log_metric`, `log_other` and `log_metrics`.
        """
        if step is not None:
            self.writer.set_step(step)
        for name, value in values.items():
            if isinstance(value, str):
                self.writer.log_other(name, value, **kwargs)
            elif isinstance(value, Mapping):
                self.writer.log_metrics(numbers_in(value), step=step, **kwargs)
            elif (number := as_number(value)) is not None:
                self.writer.log_metric(name, number, step=step, **kwargs)
            else:
                warn_dropped(self.name, name, value)

    @on_main_process
    def finish(self) -> None:
        """Send what is left and close the experiment."""
        self.writer.end()
