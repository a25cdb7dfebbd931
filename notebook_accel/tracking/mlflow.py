"""MLflow."""

from __future__ import annotations

import json
import os
from typing import Any

from .. import environ
from ..caller import warn
from .base import GeneralTracker, on_main_process
from .values import as_number, warn_dropped


class MLflowTracker(GeneralTracker):
    """Logs to a run of an experiment of MLflow.

    Args:
        experiment_name: experiment, made if it does not exist; MLFLOW_EXPERIMENT_NAME overrides it.
        logging_dir: where a new experiment keeps its files.
        run_id: a run to continue; MLFLOW_RUN_ID overrides it.
        tags: tags of the run, as a dict or its JSON; MLFLOW_TAGS overrides them.
        nested_run: open the run inside the active one; MLFLOW_NESTED_RUN overrides it.
        run_name: name of a new run.
        description: text shown with the run.
    """

    name = "mlflow"
    requires_logging_directory = False

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool | None = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__()
        chosen_tags = environ.get("MLFLOW_TAGS") or tags
        self.experiment_name = environ.get("MLFLOW_EXPERIMENT_NAME", experiment_name)
        self.logging_dir = None if logging_dir is None else os.fspath(logging_dir)
        self.run_id = environ.get("MLFLOW_RUN_ID", run_id)
        self.tags = json.loads(chosen_tags) if isinstance(chosen_tags, str) else chosen_tags
        self.nested_run = environ.flag("MLFLOW_NESTED_RUN", bool(nested_run))
        self.run_name = run_name
        self.description = description

    @on_main_process
    def start(self) -> None:
        """Open the run, in MLflow's own default experiment where none is named."""
        import mlflow

        self.active_run = mlflow.start_run(
            run_id=self.run_id,
            experiment_id=None if self.experiment_name is None else self._experiment(self.experiment_name),
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )

    def _experiment(self, name: str) -> Any:
        import mlflow

        found = mlflow.get_experiment_by_name(name)
        if found is not None:
            return found.experiment_id
        return mlflow.create_experiment(name=name, artifact_location=self.logging_dir, tags=self.tags)

    @property
    def tracker(self) -> Any:
        """MLflow's active run."""
        return self.active_run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters as texts.

        Args:
            values: the hyperparameters by name. One that is longer than MLflow allows is left out with a warning.
        """
        import mlflow
        from mlflow.utils import validation

        longest = validation.MAX_PARAM_VAL_LENGTH
        kept = []
        for name, value in values.items():
            if len(str(value)) > longest:
                warn(
                    f"mlflow cannot store {name!r}: its text is longer than {longest} characters",
                )
            else:
                kept.append((name, value))
        batch = validation.MAX_PARAMS_TAGS_PER_BATCH
        for start in range(0, len(kept), batch):
            mlflow.log_params(dict(kept[start : start + batch]))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add numbers.

        Args:
            values: numbers by name; anything else is left out with a warning.
            step: the step that they belong to.
            kwargs: for `mlflow.log_metrics`.
        """
        import mlflow

        metrics = {}
        for name, value in values.items():
            number = as_number(value)
            if number is None:
                warn_dropped(self.name, name, value)
            else:
                metrics[name] = number
        mlflow.log_metrics(metrics, step=step, **kwargs)

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Add a figure as a file of the run.

        Args:
            figure: a figure of matplotlib or plotly.
            artifact_file: path of the file in the run.
            save_kwargs: for `mlflow.log_figure`.
        """
        import mlflow

        mlflow.log_figure(figure=figure, artifact_file=artifact_file, **save_kwargs)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Add all files of a folder.

        Args:
            local_dir: the folder.
            artifact_path: folder in the run that they go to, None for its top.
        """
        import mlflow

        mlflow.log_artifacts(local_dir=local_dir, artifact_path=artifact_path)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Add a file.

        Args:
            local_path: the file.
            artifact_path: folder in the run that it goes to, None for its top.
        """
        import mlflow

        mlflow.log_artifact(local_path=local_path, artifact_path=artifact_path)

    @on_main_process
    def finish(self) -> None:
        """Close the run."""
        import mlflow

        mlflow.end_run()
