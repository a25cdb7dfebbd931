"""Launches the cases of Trainer with this package and with Accelerate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.libraries import sides

Results = list[dict[str, dict[str, dict[str, Any]]]]
"""For each rank what the cases of each module found."""


def launch(folder: Path, name: str, *modules: str, attempts: int = 1) -> Results:
    """Run the cases of modules as `sides.RUNS` says, and return what they found.

    Args:
        folder: for all files.
        name: of the run; it ends with the number of processes.
        modules: of cases, in this folder.
        attempts: how often it may be tried.
    """
    place = folder / f"{name}-{attempts}"
    place.mkdir()
    words = [*sides.RUNS[name], "-m", "tests.libraries.trainer.run_cases", str(place), *modules]
    try:
        sides.call(words, {"DS_ACCELERATOR": "cpu"}, place)
    except AssertionError:
        if attempts == 1:
            raise
        return launch(folder, name, *modules, attempts=attempts - 1)
    found = [json.loads((place / f"{rank}.json").read_text()) for rank in range(int(name[-1]))]
    assert all(("notebook_accel" in rank["library"]) is name.startswith("ours") for rank in found)
    return [rank["cases"] for rank in found]
