"""Aim."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .base import GeneralTracker, on_main_process


class AimTracker(GeneralTracker):
    """Logs to a run in a repository of Aim, which is the logging directory.

    Args:
        run_name: name of the run.
        logging_dir: folder of the repository.
        kwargs: for `aim.Run`.
    """

    name = "aim"
    requires_logging_directory = True

    def __init__(
        self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any
    ) -> None:
        super().__init__()
        self.run_name = run_name
        self.aim_repo_path = logging_dir
        self.init_kwargs = kwargs

    @on_main_process
    def start(self) -> None:
        """Open the run."""
        from aim import Run

        repo = None if self.aim_repo_path is None else os.fspath(self.aim_repo_path)
        self.writer = Run(repo=repo, **self.init_kwargs)
        self.writer.name = self.run_name

    @property
    def tracker(self) -> Any:
        """Aim's run."""
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters under `hparams`."""
        self.writer["hparams"] = values

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add values of any type that Aim tracks.

        Args:
            values: the values by name.
            step: the step that they belong to.
            kwargs: for `Run.track`.
        """
        for name, value in values.items():
            self.writer.track(value, name=name, step=step, **kwargs)

    @on_main_process
    def log_images(
        self,
        values: dict[str, Any],
        step: int | None = None,
        kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Add images.

        Args:
            values: images (arrays or PIL's) by name, each alone or as (image, caption).
            step: the step that they belong to.
            kwargs: keywords for `aim.Image` under `aim_image`, and for `Run.track` under `track`.
        """
        import aim

        options = kwargs or {}
        for name, value in values.items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            shown = aim.Image(image, caption=caption, **options.get("aim_image", {}))
            self.writer.track(shown, name=name, step=step, **options.get("track", {}))

    @on_main_process
    def finish(self) -> None:
        """Close the run."""
        self.writer.close()
