"""ProjectConfiguration: where a run writes, and how its checkpoints are named and kept."""

from __future__ import annotations

import os
from dataclasses import dataclass

PathLike = str | os.PathLike[str]


@dataclass
class ProjectConfiguration:
    """Folders and checkpoints of a run.

    Attributes:
        project_dir: folder for what the run writes.
        logging_dir: folder for logs; by default `project_dir`.
        automatic_checkpoint_naming: save to `project_dir/checkpoints/checkpoint_N`, N counting from `iteration`.
        total_limit: how many automatically named checkpoints are kept; the older ones are removed once the new
            one is on the disk. None keeps all.
        iteration: number of the next checkpoint.
        save_on_each_node: write what all processes share once on each node, where nodes share no disk.

    Raises:
        ValueError: `total_limit` or `iteration` is too small.
    """

    project_dir: PathLike | None = None
    logging_dir: PathLike | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        if self.total_limit is not None and self.total_limit < 1:
            raise ValueError(f"total_limit {self.total_limit} < 1: the last checkpoint is always kept")
        if self.iteration < 0:
            raise ValueError(f"iteration {self.iteration} < 0")
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: PathLike | None = None) -> None:
        """Set `project_dir`, and `logging_dir` where it has none."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir
