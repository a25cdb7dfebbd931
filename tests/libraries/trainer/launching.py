"""Runs the cases of Trainer with this package and with Accelerate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.libraries import hosts, sides

Results = list[dict[str, dict[str, dict[str, Any]]]]
"""For each rank what the cases of each module found."""
LIBRARIES = ("torch._dynamo", "transformers.trainer_seq2seq")


def serve(
    folder: Path, served_by: sides.Hosts, name: str, modules: Sequence[str], attempts: int = 1
) -> Results:
    """Run the cases of modules on a host, and return what they found.

    Args:
        folder: for all files.
        served_by: the hosts.
        name: one of `sides.RUNS`.
        modules: of cases, in this folder.
        attempts: how often it may be tried.
    """
    place = folder / f"{name}-{attempts}"
    place.mkdir()
    job = hosts.Job(
        function=f"{__package__}.run_cases:run_modules",
        arguments=[str(place), *modules],
        number=int(name[-1]),
        folder=str(place),
        libraries=[*LIBRARIES, *(f"{__package__}.{module}" for module in modules)],
    )
    try:
        served_by[name[:-1]].run(job)
    except AssertionError:
        if attempts == 1:
            raise
        return serve(folder, served_by, name, modules, attempts - 1)
    return read(place, name)


def launch(folder: Path, number: int, *modules: str) -> Results:
    """Run the cases of modules on this package as a user does, by the command, and return what they found.

    Args:
        folder: for all files.
        number: of processes.
        modules: of cases, in this folder.
    """
    words = [*sides.LAUNCH, str(number), "-m", f"{__package__}.run_cases", str(folder), *modules]
    sides.call(words, {"DS_ACCELERATOR": "cpu"}, folder)
    return read(folder, f"ours{number}")


def read(place: Path, name: str) -> Results:
    """Return what the processes of a run wrote, which is to be one of a side.

    Args:
        place: where to.
        name: one of `sides.RUNS`.
    """
    found = [json.loads((place / f"{rank}.json").read_text()) for rank in range(int(name[-1]))]
    assert all(("notebook_accel" in rank["library"]) is name.startswith("ours") for rank in found)
    return [rank["cases"] for rank in found]
