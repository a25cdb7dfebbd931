"""wandb, swanlab and trackio: a run of a project, with one interface."""

from __future__ import annotations

import importlib
from typing import Any

from .base import GeneralTracker, on_main_process


class _RunTracker(GeneralTracker):
    """Logs to a run of a project.

    Args:
        run_name: name of the project.
        kwargs: for the library's `init`.
    """

    requires_logging_directory = False
    main_process_only = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs

    @property
    def _library(self) -> Any:
        return importlib.import_module(self.name)

    @on_main_process
    def start(self) -> None:
        """Open the run."""
        self.run = self._library.init(project=self.run_name, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The library's run."""
        return self.run

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add values.

        Args:
            values: values of any type that the library knows, by name.
            step: the step that they belong to.
            kwargs: for its run's `log`.
        """
        self.run.log(values, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Close the run."""
        self.run.finish()


class _ImageTracker(_RunTracker):
    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add images.

        Args:
            values: lists of images (arrays or PIL's) by name.
            step: the step that they belong to.
            kwargs: for the run's `log`.
        """
        for name, images in values.items():
            self.log({name: [self._library.Image(image) for image in images]}, step=step, **kwargs)


class WandBTracker(_ImageTracker):
    """Logs to Weights & Biases. Every process that has called `start` may log."""

    name = "wandb"

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters. They may replace values that the run already has."""
        self.run.config.update(values, allow_val_change=True)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Add a table, given as `columns` and `data` or as a `dataframe`.

        Args:
            table_name: its name.
            columns: names of the columns.
            data: the rows.
            dataframe: a pandas DataFrame.
            step: the step that it belongs to.
            kwargs: for the run's `log`.
        """
        table = self._library.Table(columns=columns, data=data, dataframe=dataframe)
        self.log({table_name: table}, step=step, **kwargs)


class SwanLabTracker(_ImageTracker):
    """Logs to SwanLab. Every process that has called `start` may log."""

    name = "swanlab"

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters."""
        self._library.config.update(values)


class TrackioTracker(_RunTracker):
    """Logs to trackio, which keeps runs on this machine. Every process that has called `start` may log."""

    name = "trackio"

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters."""
        self.run.config.update(values)
