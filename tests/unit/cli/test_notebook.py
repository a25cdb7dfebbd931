"""Tests for `notebook-accel launch` of a notebook: parameters, output, failures and interrupts."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from click.testing import CliRunner

from notebook_accel.cli import notebook
from notebook_accel.cli.main import cli
from notebook_accel.cli.notebook_file import NotebookFile
from tests.unit import launching
from tests.unit.launching import Launched, dry, run

alone = launching.alone


def write_book(*sources: str, parameters: str | None = None) -> Path:
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    if parameters is not None:
        cells.insert(0, nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}))
    nbformat.write(nbformat.v4.new_notebook(cells=cells), "x.ipynb")
    return Path("x.ipynb")


def test_a_notebook_runs_with_parameters_and_is_written_although_a_cell_fails() -> None:
    first = "import os\nprint(rate, name, os.environ['ACCELERATE_MIXED_PRECISION'])\n3 + 4"
    write_book(first, "1 / 0", parameters="rate = 1\nname = 'a'")
    words = ("-p", "rate=1e-3", "-p", "name=no way", "--output=out/y.ipynb")
    out, errors = run("--mixed_precision=bf16", "x.ipynb", *words, code=1)
    assert out == "0.001 no way bf16\n7\n"
    assert errors.count("ZeroDivisionError: division by zero") == 1
    assert "its own launches say their mixed_precision" in errors and "num_processes" not in errors
    assert errors.endswith("a cell of x.ipynb failed\nnotebook-accel: wrote out/y.ipynb\n")
    book = nbformat.read("out/y.ipynb", as_version=4)
    assert book.cells[1].source == "# Parameters\nrate = 0.001\nname = 'no way'"
    assert book.cells[1].metadata.tags == ["injected-parameters"]
    assert book.cells[3].outputs[0].ename == "ZeroDivisionError"
    assert nbformat.read("x.ipynb", as_version=4).cells[1].outputs == []


def test_a_cell_that_is_to_be_skipped_is_not_announced() -> None:
    path = write_book("print(1)", "print(2)")
    book = nbformat.read(path, as_version=4)
    book.cells[0].metadata["tags"] = ["skip-execution"]
    nbformat.write(book, path)
    out, errors = run("x.ipynb")
    assert out == "2\n"
    assert [line for line in errors.splitlines() if "cell " in line] == ["--- cell 2 of 2: print(2)"]


BAR = """
from notebook_accel import notebook_launcher

def train():
    import time
    from tqdm import tqdm
    for _ in tqdm(range(20), desc="b"):
        time.sleep(0.05)

notebook_launcher(train, num_processes=2)
"""


def test_the_bar_of_a_worker_is_printed_as_it_was_last() -> None:
    write_book(BAR, "print('after')")
    out, _ = run("x.ipynb")
    bars = [line for line in out.splitlines() if line.startswith("b: ")]
    assert len(bars) == 1 and bars[0].startswith("b: 100%") and " 20/20 " in bars[0]
    assert out.endswith(f"{bars[0]}\nafter\n")


def test_the_bar_of_a_cell_that_is_a_widget_is_printed_as_it_was_last() -> None:
    pytest.importorskip("ipywidgets")
    write_book("from tqdm.auto import tqdm\nfor _ in tqdm(range(3), desc='b'): pass", "print('after')")
    out, _ = run("x.ipynb")
    assert out.startswith("b: 100% 3/3 [") and out.endswith("]\nafter\n") and out.count("\n") == 2


def test_an_interrupt_reaches_the_cell() -> None:
    write_book("import time\nprint('up', flush=True)\ntime.sleep(60)", "print('never')")
    launched = Launched(("x.ipynb",))
    assert launched.out.readline() == "up\n"
    children = psutil.Process(launched.pid).children(recursive=True)
    os.kill(launched.pid, signal.SIGINT)
    code, out, errors = launched.wait()
    assert (code, out) == (130, "")
    assert "notebook-accel: ended by SIGINT\n" in errors
    assert not psutil.wait_procs(children, timeout=240)[1]
    book = nbformat.read("x.executed.ipynb", as_version=4)
    assert [output.get("ename") for output in book.cells[0].outputs] == [None, "KeyboardInterrupt"]


def test_a_lost_terminal_leaves_what_was_run() -> None:
    write_book("import time\nprint('up', flush=True)\ntime.sleep(60)")
    launched = Launched(("x.ipynb",))
    assert launched.out.readline() == "up\n"
    os.kill(launched.pid, signal.SIGHUP)
    assert launched.wait()[0] == 128 + signal.SIGHUP
    assert nbformat.read("x.executed.ipynb", as_version=4).cells[0].outputs[0].text == "up\n"


def test_a_killed_launch_leaves_the_outputs_so_far() -> None:
    sources = [
        "import os, time\nprint('first')",
        "print('second', os.getpid(), flush=True)\ntime.sleep(60)",
        "3",
    ]
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    cells[2].outputs = [nbformat.v4.new_output("stream", text="of an earlier run")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), "x.ipynb")
    launched = Launched(("x.ipynb",))
    assert launched.out.readline() == "first\n"
    kernel = psutil.Process(int(launched.out.readline().split()[1]))
    connection = Path(next(word for word in kernel.cmdline() if word.endswith(".json")))
    deadline = time.monotonic() + 60
    found: list[Any] = []
    while time.monotonic() < deadline and not (found and found[1]):
        if Path("x.executed.ipynb").exists():  # whole, whenever it is read
            book = nbformat.read("x.executed.ipynb", as_version=4)
            found = [[output.text.split()[0] for output in cell.outputs] for cell in book.cells]
        time.sleep(0.02)
    os.kill(launched.pid, signal.SIGKILL)
    launched.wait()
    assert found == [["first"], ["second"], []]
    assert sorted(path.name for path in Path().iterdir() if "ipynb" in path.name) == [
        "x.executed.ipynb",
        "x.ipynb",
    ]
    assert not psutil.wait_procs([kernel], timeout=240)[1], "it ends with the process that started it"
    connection.unlink()  # nobody else does


def test_what_cannot_be_written_meanwhile_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("notebook_accel.cli.notebook_file._SHARE", 1e9)
    folder = tmp_path / "folder"
    file = NotebookFile(nbformat.v4.new_notebook(), folder / "x.ipynb", said.append)
    for _ in range(2):
        file.note_change()
        file.write_soon()
    assert len(said) == 1 and "x.ipynb cannot be written yet: [Errno 2]" in said[0]
    with pytest.raises(FileNotFoundError):
        file.close()
    folder.mkdir()
    file.close()
    assert [path.name for path in folder.iterdir()] == ["x.ipynb"]


def test_a_link_and_a_mode_stay(tmp_path: Path) -> None:
    kept, link = tmp_path / "kept.ipynb", tmp_path / "link.ipynb"
    kept.write_text("")
    kept.chmod(0o640)
    link.symlink_to(kept)
    NotebookFile(nbformat.v4.new_notebook(), link, print).close()
    assert link.is_symlink() and kept.stat().st_mode & 0o777 == 0o640
    assert nbformat.read(kept, as_version=4).cells == []


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        (".", ". is a folder: name a file in it"),
        ("x.ipynb/y.ipynb", "x.ipynb/y.ipynb cannot be written: File exists"),
    ],
)
def test_where_the_output_cannot_go_is_told_before_a_cell_runs(output: str, sentence: str) -> None:
    write_book("open('ran', 'w')")
    assert run("x.ipynb", "-o", output, code=2)[1] == f"Error: {sentence}\n"
    assert not Path("ran").exists()


MINOR_OF_NONE = '{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": null}'


@pytest.mark.parametrize("text", ["[]", '{"cells": [], "metadata": {}, "nbformat": 4}', MINOR_OF_NONE])
def test_json_of_something_else_is_no_notebook(text: str) -> None:
    Path("x.ipynb").write_text(text)
    assert run("x.ipynb", code=2)[1] == "Error: x.ipynb is no notebook: it is JSON of something else\n"


def test_a_dry_run_of_a_notebook() -> None:
    write_book("1")
    result = dry("x.ipynb", "-p", "a=1")
    assert result.output.splitlines()[1] == "  papermill x.ipynb x.executed.ipynb -p a 1"
    assert not Path("x.executed.ipynb").exists()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1), ("1e-3", 0.001), ("-2.5", -2.5), ("true", True), ("null", None), ("", ""), ("bf16", "bf16"),
        ("no", "no"), ("'1'", "1"), ("[1, 2]", "[1, 2]"), ("a: b", "a: b"), ("2024-01-01", "2024-01-01"), ("{", "{"),
    ],
)  # fmt: skip
def test_parameters_are_yaml_scalars(text: str, value: Any) -> None:
    found = notebook.parse_scalar(text)
    assert (found, type(found)) == (value, type(value))


def test_where_parameters_go() -> None:
    book = nbformat.read(write_book("last", parameters="rate: float = 1\nname = 2"), as_version=4)
    assert notebook.inject(book, {"rate": float("inf")}) == []
    assert notebook.inject(book, {"rates": 2}) == [
        "the parameters cell does not set rates, did you mean rate?"
    ]
    assert [cell.source for cell in book.cells][1:] == ["# Parameters\nrates = 2", "last"]
    bare = nbformat.read(write_book("last"), as_version=4)
    assert "no cell is tagged" in notebook.inject(bare, {"rate": float("inf")})[0]
    assert bare.cells[0].source == "# Parameters\nrate = float('inf')"
    nbformat.validate(bare)


@pytest.mark.parametrize("text", ["rate", "1a=2", "for=1"])
def test_a_wrong_parameter_is_refused(text: str) -> None:
    write_book("1")
    result = CliRunner().invoke(cli, ["launch", "x.ipynb", "-p", text])
    assert result.exit_code == 2 and "is not NAME=VALUE with a Python name" in " ".join(result.output.split())
