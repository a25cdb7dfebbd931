"""Every tutorial runs from top to bottom in a real kernel, in the way `make demo` runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = sorted((ROOT / "tutorials").glob("*.ipynb"))
ELSEWHERE = {"07_many_nodes", "08_tpu"}  # tests/nodes and tests/xla run these in their own set-ups
# the line that is looked for, and what it starts with
TELLS = {"09_fsdp": ("Each process holds", "Each process holds 50.")}
# what is printed besides, by tutorial
SAYS = {
    "01_first_launch": ["caught: a learning rate of -1 makes no sense"],
    "02_config": [
        "2 processes, bf16, 2 batches a step",
        "mixed_precison is no option, did you mean mixed_precision?",
    ],
    "05_cell_by_cell": ["rank 0 has entered backward, rank 1 has not", "Out: (23, 15)", "Out: (22, 6)"],
    "03_images": ["before: accuracy", "with random filters"],
    "04_watch_a_run": ["stopped - saved in epoch", "going on in epoch"],
    "06_elastic": ["killed rank 1 in step", "restarted 1 time: going on in epoch", "undisturbed: "],
    "11_cluster": ["rank 1 of 2 trained on", "stopped after"],
    "10_big_inference": ["not on cpu: ", "stays whole", "the same output, bit for bit"],
}
# those whose subject is what the notebook packages do: cells, views, forms, magics
SHOWN = {"01_first_launch", "02_config", "04_watch_a_run", "05_cell_by_cell"}
pytestmark = [pytest.mark.notebook, pytest.mark.slow]


def execute(notebook: Path, output: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        str(ROOT / "tutorials" / "run.py"),
        str(notebook),
        "--output",
        str(output),
        *more,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, check=False)


@pytest.mark.parametrize(
    "notebook",
    [
        pytest.param(path, id=path.stem, marks=[] if path.stem in SHOWN else [pytest.mark.once])
        for path in TUTORIALS
        if path.stem not in ELSEWHERE
    ],
)
def test_a_tutorial_runs(notebook: Path, tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="needs the extra `tutorial`")
    line, start = TELLS.get(notebook.stem, ("Test accuracy", "Test accuracy: 9"))
    done = execute(notebook, tmp_path / "executed.ipynb", "--show", line)
    assert done.returncode == 0, done.stdout + done.stderr
    assert start in done.stdout.splitlines()[-2]
    executed = nbformat.read(tmp_path / "executed.ipynb", as_version=4)
    outputs = [output for cell in executed.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [text for text in SAYS.get(notebook.stem, []) if text not in done.stdout]


@pytest.mark.once
@pytest.mark.parametrize("notebook", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_asks_for_no_two_gpus(notebook: Path) -> None:
    stored = nbformat.read(notebook, as_version=4)
    code = "\n".join(cell.source for cell in stored.cells if cell.cell_type == "code")
    first = re.search(r"num_processes=2\b|num_processes\": 2\b|%session 2\b|num_nodes=2\b", code)
    chosen = re.search(r'^ *os\.environ\["ACCELERATE_USE_CPU"\] = "1"( |$)|use_cpu=True', code, re.MULTILINE)
    assert first is None or chosen is not None


def test_the_runner_reports_a_failing_cell(tmp_path: Path) -> None:
    source = tmp_path / "fails.ipynb"
    cells = [nbformat.v4.new_code_cell(text) for text in ("print('before')", "1 / 0", "print('after')")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), source)
    done = execute(source, tmp_path / "executed.ipynb")
    assert done.returncode == 1
    assert "before" in done.stdout and "after" not in done.stdout.replace("before", "")
    assert "ZeroDivisionError" in done.stderr
    executed = nbformat.read(tmp_path / "executed.ipynb", as_version=4)
    assert executed.cells[1].outputs[0].ename == "ZeroDivisionError"


def test_the_runner_leaves_out_cells_that_install(tmp_path: Path) -> None:
    source = tmp_path / "installs.ipynb"
    install = nbformat.v4.new_code_cell("1 / 0", metadata={"tags": ["install"]})
    cells = [install, nbformat.v4.new_code_cell("print(6 * 7)")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), source)
    done = execute(source, tmp_path / "executed.ipynb")
    assert done.returncode == 0, done.stderr
    assert "--- cell 1 of 1: print(6 * 7)\n42" in done.stdout
    executed = nbformat.read(tmp_path / "executed.ipynb", as_version=4)
    assert not executed.cells[0].outputs


@pytest.mark.once
@pytest.mark.parametrize("notebook", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_is_stored_without_outputs(notebook: Path) -> None:
    stored = nbformat.read(notebook, as_version=4)
    nbformat.validate(stored)
    code = [cell for cell in stored.cells if cell.cell_type == "code"]
    assert not [cell for cell in code if cell.outputs or cell.execution_count]
