"""The accelerator's profiler."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..handlers import ProfileKwargs
from .base import Shared
from .kinds import require_handler


class ProfilePart(Shared):
    """Show where time and memory go."""

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[torch.profiler.profile]:
        """Run the block under torch's profiler, which `as` gives.

        With `output_trace_dir` each process then writes `profile_{rank}.json` there, for `chrome://tracing` or
        https://ui.perfetto.dev, and waits for the others. Under a schedule call the profiler's `step` after each
        step of training; the file holds the last cycle that was recorded.

        Args:
            profile_handler: what to record, instead of the `ProfileKwargs` among `kwargs_handlers`.

        Raises:
            TypeError: `profile_handler` is of another kind.
            RuntimeError: there is a folder for traces, and the schedule recorded nothing.
        """
        require_handler("profile", profile_handler, ProfileKwargs, "build")
        handler = profile_handler or self.profile_handler or ProfileKwargs()
        profiler = handler.build()
        with profiler:
            yield profiler
        if handler.output_trace_dir is None:
            return
        rank = self._runtime.topology.rank
        try:
            os.makedirs(handler.output_trace_dir, exist_ok=True)
            _export(profiler, os.path.join(handler.output_trace_dir, f"profile_{rank}.json"), handler)
        finally:
            self._runtime.comm.barrier()


def _export(profiler: torch.profiler.profile, path: str, handler: ProfileKwargs) -> None:
    recorded = profiler.profiler
    if recorded is None or recorded.kineto_results is None:
        raise RuntimeError(
            f"the profiler recorded nothing in {profiler.step_num} steps under schedule_option "
            f"{handler.schedule_option}: call step() of the profiler after each step, and often enough"
        )
    profiler.export_chrome_trace(path)
