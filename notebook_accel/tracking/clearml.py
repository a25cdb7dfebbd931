"""ClearML."""

from __future__ import annotations

from typing import Any

from .. import environ
from .base import GeneralTracker, on_main_process
from .values import as_number, warn_dropped

_SERIES = ("eval", "test", "train")


class ClearMLTracker(GeneralTracker):
    """Logs to a task of ClearML: the current one, which then stays open, or a new one.

    Args:
        run_name: name of project and task of a new task, where neither `kwargs` nor the variables CLEARML_PROJECT and
            CLEARML_TASK name them.
        kwargs: for `Task.init`.
    """

    name = "clearml"
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self._is_ours = False

    @on_main_process
    def start(self) -> None:
        """Take the current task, or open one."""
        from clearml import Task

        self.task = Task.current_task()
        if self.task:
            return
        names = {
            "project_name": environ.get("CLEARML_PROJECT", self.run_name),
            "task_name": environ.get("CLEARML_TASK", self.run_name),
        }
        self.task = Task.init(**{**names, **self.init_kwargs})
        self._is_ours = True

    @property
    def tracker(self) -> Any:
        """ClearML's task."""
        return self.task

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters as the task's configuration."""
        self.task.connect_configuration(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add numbers: with a step as points of a curve, else as single values.

        `eval_`, `test_` or `train_` before a name is the curve's series.

        Args:
            values: numbers by name; anything else is left out with a warning.
            step: the step that they belong to, None for single values.
            kwargs: for `report_scalar` or `report_single_value`.
        """
        logger = self.task.get_logger()
        for name, value in values.items():
            number = as_number(value)
            if number is None:
                warn_dropped(self.name, name, value)
            elif step is None:
                logger.report_single_value(name=name, value=number, **kwargs)
            else:
                title, series = _title_and_series(name)
                logger.report_scalar(title=title, series=series, value=number, iteration=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add images.

        Images of a list are numbered, since ClearML keeps one for each title, series and step.

        Args:
            values: an image or a list of images (arrays or PIL's) by name.
            step: the step that they belong to.
            kwargs: for `report_image`.
        """
        logger = self.task.get_logger()
        for name, value in values.items():
            title, series = _title_and_series(name)
            if not isinstance(value, (list, tuple)):
                logger.report_image(title=title, series=series, iteration=step, image=value, **kwargs)
                continue
            for number, image in enumerate(value):
                numbered = f"{series}_{number}"
                logger.report_image(title=title, series=numbered, iteration=step, image=image, **kwargs)

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
        """Add a table, given as a `dataframe` or as `data`.

        Args:
            table_name: title of the table; its first part may be a series, as in `log`.
            columns: names of the columns; without them the first row of `data` has the names.
            data: the rows.
            dataframe: a pandas DataFrame, which comes before `data`.
            step: the step that it belongs to.
            kwargs: for `report_table`.

        Raises:
            ValueError: there is neither `data` nor `dataframe`.
        """
        table = dataframe
        if table is None:
            if data is None:
                raise ValueError(f"table {table_name!r} has neither data nor dataframe: give one of them")
            table = [columns, *data] if columns else data
        title, series = _title_and_series(table_name)
        self.task.get_logger().report_table(
            title=title, series=series, table_plot=table, iteration=step, **kwargs
        )

    @on_main_process
    def finish(self) -> None:
        """Close the task if `start` opened it."""
        if self._is_ours:
            self.task.close()


def _title_and_series(name: str) -> tuple[str, str]:
    series, _, title = name.partition("_")
    return (title, series) if series in _SERIES and title else (name, "train")
