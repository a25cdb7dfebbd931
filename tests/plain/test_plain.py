"""Everything that README begins with works where torch and this package were installed, and nothing else."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.notebooks.kernel import Kernel, make_event_loop
from tests.plain.plain import find_python, run
from tests.structure.pages import read_blocks
from tests.structure.source import ROOT

OF_EVERY_ENVIRONMENT = {"pip", "setuptools"}
README = [block.code for block in read_blocks(ROOT / "README.md") if block.kind == "python"]
SCRIPT = """
import sys
import torch
from notebook_accel import Accelerator, notebook_launcher


def add_ranks():
    accelerator = Accelerator()
    return accelerator.reduce(torch.tensor([accelerator.process_index + 1.0]), "sum").item()


if __name__ == "__main__":
    print("sum", notebook_launcher(add_ranks, num_processes=2) if sys.argv[1:] == ["itself"] else add_ranks())
"""
SAVE_AND_LOAD = """
import numpy as np

def save_and_load(folder):
    accelerator = Accelerator()
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    accelerator.save_state(folder)
    weights = model.module.weight.detach().clone()
    drawn = np.random.rand(), torch.rand(1).item()
    with torch.no_grad():
        model.module.weight.zero_()
    accelerator.load_state(folder)
    return bool((model.module.weight == weights).all()), (np.random.rand(), torch.rand(1).item()) == drawn

notebook_launcher(save_and_load, args=("saved",), num_processes=2, returns="all")
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel of the plain environment, whose view is the one that users see."""
    make_event_loop()
    started = Kernel(
        tmp_path_factory.mktemp("kernel"),
        python=find_python(),
        PYTHONPATH="",
        NOTEBOOK_ACCEL_VIEW="auto",
        ACCELERATE_USE_CPU="true",
    )
    yield started
    started.close()


def list_required(there: dict[str, importlib.metadata.Distribution], name: str) -> set[tuple[str, str]]:
    """Return packages that are needed, each with one of its extras that is asked for, or none."""
    found: set[tuple[str, str]] = set()
    open_ends = {(name, "")}
    while open_ends:
        found |= open_ends
        open_ends = {
            (canonicalize_name(needed.name), extra)
            for package, asked in open_ends
            if package in there
            for needed in map(Requirement, there[package].requires or [])
            if needed.marker is None or needed.marker.evaluate({"extra": asked})
            for extra in ("", *needed.extras)
        } - found
    return found


def test_nothing_is_there_that_nobody_asked_for(tmp_path: Path) -> None:
    site = run(tmp_path, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
    there = {
        canonicalize_name(one.metadata["Name"]): one for one in importlib.metadata.distributions(path=[site])
    }
    required = {package for package, _ in list_required(there, "notebook-accel")}
    assert {"torch", "numpy", "ipykernel"} <= required & there.keys()
    assert not there.keys() - required - OF_EVERY_ENVIRONMENT


def test_the_command_finds_that_launches_work(tmp_path: Path) -> None:
    tried = run(tmp_path, "-m", "notebook_accel", "test")
    assert tried.returncode == 0, tried.stdout + tried.stderr
    assert tried.stdout.endswith("all passed: launches work on this machine\n")
    looked = run(tmp_path, "-m", "notebook_accel", "doctor")
    assert looked.returncode == 0 and "\nproblem" not in looked.stdout, looked.stdout + looked.stderr
    assert "ok       libraries: all " in looked.stdout and "ok       view: ipywidgets " in looked.stdout


@pytest.mark.parametrize("command", ["test", "doctor"])
def test_a_numpy_that_cannot_be_imported_is_named(tmp_path: Path, command: str) -> None:
    broken = tmp_path / "path" / "numpy"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("from . import core\n")
    (broken / "core.py").write_text(
        "try:\n    import missing9\nexcept ImportError as error:\n"
        "    raise ImportError('PLEASE READ THIS\\n\\nfor advice') from error\n"
    )
    done = run(tmp_path, "-m", "notebook_accel", command, PYTHONPATH=str(broken.parent))
    assert done.returncode == 1
    assert done.stderr == (
        "Error: numpy cannot be imported (ModuleNotFoundError: No module named 'missing9'): "
        "pip install --force-reinstall 'numpy>=1.26'\n"
    )


def test_the_cell_of_readme(kernel: Kernel) -> None:
    cell = kernel.run(README[0]).ok()
    sent = [output["content"]["data"] for output in cell.outputs if output["type"] == "display_data"]
    assert any("application/vnd.jupyter.widget-view+json" in data for data in sent)
    assert (
        kernel.run("losses.shape, notebook_launcher.__module__").value
        == "(torch.Size([2]), 'notebook_accel.launchers')"
    )


def test_a_state_is_saved_and_loaded(kernel: Kernel) -> None:
    kernel.run(
        "import torch\nfrom torch import nn\nfrom notebook_accel import Accelerator, notebook_launcher"
    ).ok()
    assert kernel.run(SAVE_AND_LOAD).ok().value == "[(True, True), (True, True)]"


def test_a_session(kernel: Kernel) -> None:
    kernel.run("%load_ext notebook_accel").ok()
    kernel.run("%session 2").ok()
    kernel.run("%%distributed\nimport torch\nshare = torch.ones(2) * (torch.distributed.get_rank() + 1)").ok()
    kernel.run("from notebook_accel import current_session\nsession = current_session()").ok()
    assert (
        kernel.run("[x.tolist() for x in session.pull('share', rank='all')]").ok().value
        == "[[1.0, 1.0], [2.0, 2.0]]"
    )
    kernel.run("session.close()").ok()


@pytest.mark.parametrize(
    "words",
    [("script.py", "itself"), ("-m", "notebook_accel", "launch", "--num_processes", "2", "script.py")],
    ids=["notebook_launcher", "launch"],
)
def test_a_script(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run(tmp_path, *words)
    assert done.returncode == 0 and "sum 3.0" in done.stdout, done.stdout + done.stderr
