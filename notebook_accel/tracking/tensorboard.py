"""TensorBoard, by the writer of torch or of tensorboardX."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..probes import is_available
from .base import GeneralTracker, on_main_process
from .values import as_number, numbers_in, plain, warn_dropped


class TensorBoardTracker(GeneralTracker):
    """Writes event files to the folder `run_name` below the logging directory.

    Args:
        run_name: name of the folder.
        logging_dir: the folder above it.
        kwargs: for `SummaryWriter`.
    """

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = os.path.join(logging_dir, run_name)
        self.init_kwargs = kwargs

    @on_main_process
    def start(self) -> None:
        """Open the event file."""
        by = "torch.utils.tensorboard" if is_available("tensorboard") else "tensorboardX"
        self.writer = importlib.import_module(by).SummaryWriter(self.logging_dir, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The `SummaryWriter`."""
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters for TensorBoard, and in a file `hparams.yml`.

        The file is in a folder named by the time, beside the event file.

        Args:
            values: the hyperparameters by name; lists and dicts are texts for TensorBoard.
        """
        import yaml

        stored = plain(values)
        flat = {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in stored.items()}
        self.writer.add_hparams(flat, metric_dict={})
        self.writer.flush()
        folder = Path(self.logging_dir, str(time.time()))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hparams.yml").write_text(yaml.safe_dump(stored), encoding="utf-8")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add values.

        Args:
            values: numbers, texts and dicts of numbers by name; anything else is left out with a warning.
            step: the step that they belong to.
            kwargs: for `add_scalar`, `add_text` or `add_scalars`.
        """
        for name, value in values.items():
            if isinstance(value, str):
                self.writer.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, Mapping):
                self.writer.add_scalars(name, numbers_in(value), global_step=step, **kwargs)
            elif (number := as_number(value)) is not None:
                self.writer.add_scalar(name, number, global_step=step, **kwargs)
            else:
                warn_dropped(self.name, name, value)
        self.writer.flush()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add batches of images.

        Args:
            values: batches by name: an array [batch, channel, height, width], or a list of images of one shape.
            step: the step that they belong to.
            kwargs: for `add_images`. Its `dataformats="NHWC"` is the layout of PIL's images.
        """
        import numpy as np

        for name, images in values.items():
            batch = np.stack([np.asarray(i) for i in images]) if isinstance(images, (list, tuple)) else images
            self.writer.add_images(name, batch, global_step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Write what is not written yet and close the file."""
        self.writer.close()
