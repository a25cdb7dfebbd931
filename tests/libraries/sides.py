"""Runs a script of `scripts` on Accelerate and on the take-over, in one and in two processes."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.libraries import hosts

SCRIPTS = Path(__file__).parent / "scripts"
LAUNCH = ("-m", "notebook_accel", "launch", "--cpu", "--as-accelerate", "--num_processes")
RUNS = ("ours2", "theirs2", "ours1", "theirs1")
LAST_SECONDS = 40

Hosts = Mapping[str, hosts.Host]
Reports = list[dict[str, Any]]
"""What each process of a run gave."""
Outcomes = dict[str, Reports]
"""What the processes of each run gave, by the names of the runs."""
_T = TypeVar("_T")


def skip_without(*libraries: str) -> None:
    """Skip a file of tests unless libraries are installed; they are not imported, which would take seconds."""
    for name in libraries:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed", allow_module_level=True)


def run_all(script: str, folder: Path, served_by: Hosts, names: Sequence[str] = RUNS) -> Outcomes:
    """Run a script as often as there are names of runs, both sides at a time.

    Args:
        script: its name in `scripts`, without `.py`.
        folder: the runs of a script have folders of their own in it.
        served_by: the hosts.
        names: of `RUNS`.
    """
    module = f"tests.libraries.scripts.{script}"
    return on_both_sides(names, lambda name: run(module, folder, served_by, name))


def on_both_sides(names: Sequence[str], do: Callable[[str], _T]) -> dict[str, _T]:
    """Return what a function gives for names of runs; those of one side come one after the other."""

    def do_side(side: str) -> dict[str, _T]:
        return {name: do(name) for name in names if name.startswith(side)}

    with ThreadPoolExecutor(len(hosts.SIDES)) as pool:
        return {name: found for part in pool.map(do_side, hosts.SIDES) for name, found in part.items()}


def run(module: str, folder: Path, served_by: Hosts, name: str) -> Reports:
    """Run the cases of a module in as many processes as the run's name ends with.

    Args:
        module: of a script, with the `LIBRARIES` that it needs.
        folder: for the run's own folder.
        served_by: the hosts.
        name: one of `RUNS`.
    """
    number = int(name[-1])
    # gloo now and then breaks the connection of two processes that the reference runs in
    for attempt in range(2 if name == "theirs2" else 1):
        own_folder = folder / f"{name}-{attempt}"
        own_folder.mkdir()
        job = hosts.Job(
            function="tests.libraries.small:run_module",
            arguments=[module],
            number=number,
            folder=str(own_folder),
            libraries=importlib.import_module(module).LIBRARIES,
        )
        try:
            served_by[name[:-1]].run(job)
        except AssertionError:
            if name != "theirs2" or attempt == 1:
                raise
        else:
            break
    return read_reports(own_folder, number)


def launch(script: str, folder: Path, number: int, *cases: str) -> Reports:
    """Run cases of a script on the take-over as a user does, by the command.

    Args:
        script: see `run_all`.
        folder: for the run's own folder.
        number: of processes.
        cases: their names.
    """
    own_folder = folder / f"launched{number}"
    own_folder.mkdir()
    call([*LAUNCH, str(number), str(SCRIPTS / f"{script}.py"), *cases], {}, own_folder)
    return read_reports(own_folder, number)


def read_reports(folder: Path, number: int) -> Reports:
    """Return what the processes of a run wrote."""
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(number)]


def call(words: Sequence[str], own: Mapping[str, str], folder: Path) -> None:
    """Run Python to its end, which has to be a good one; the error has all output.

    Args:
        words: after `python`.
        own: variables.
        folder: where it runs.
    """
    output = folder / "output.txt"
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *words],
            env={**hosts.make_environment(folder), **own},
            cwd=folder,
            stdout=file,
            stderr=file,
        )
        try:
            process.wait(hosts.SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # a launcher ends its processes then; a kill would leave them
            try:
                process.wait(LAST_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    assert process.returncode == 0, (
        f"it ended with {process.returncode}:\n{output.read_text()[-hosts.SHOWN :]}"
    )


def compare(ours: Reports, theirs: Reports, case: str) -> list[Any]:
    """Check that a case did the same on both sides, but for `own`, and return what it gave in each process.

    Args:
        ours: reports of a run on the take-over.
        theirs: those of a run on Accelerate.
        case: a name among the script's cases.
    """
    assert all("notebook_accel" in report["library"] for report in ours)
    assert not any("notebook_accel" in report["library"] for report in theirs)
    found = [[dict(report["cases"][case]) for report in side] for side in (ours, theirs)]
    own = [[report.pop("own", {}) for report in side] for side in found]
    assert found[0] == found[1]
    return [{**report, **more} for report, more in zip(found[0], own[0], strict=True)]
