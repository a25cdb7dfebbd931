"""Tutorials run from top to bottom on a machine with GPUs: on its CPU, as there may be fewer than processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.notebooks.test_tutorials import SAYS, TELLS, TUTORIALS, execute

CORES = 4  # for a tutorial
PATHS = [path for path in TUTORIALS if path.stem != "08_tpu"]

Runs = dict[str, "Future[subprocess.CompletedProcess[str]]"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    pytest.importorskip("sklearn", reason="needs the extra `tutorial`")
    folder = tmp_path_factory.mktemp("tutorials")

    def start(path: Path) -> subprocess.CompletedProcess[str]:
        line, _ = TELLS.get(path.stem, ("Test accuracy", ""))
        return execute(path, folder / path.name, "--show", line)

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // CORES)) as pool:
        yield {path.stem: pool.submit(start, path) for path in PATHS}


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("name", [path.stem for path in PATHS])
def test_a_tutorial_runs(runs: Runs, name: str) -> None:
    done = runs[name].result()
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    _, start = TELLS.get(name, ("", "Test accuracy: 9"))
    assert start in done.stdout.splitlines()[-2]
    assert not [text for text in SAYS.get(name, []) if text not in done.stdout]
