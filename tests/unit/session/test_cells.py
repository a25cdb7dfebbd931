"""Cells that a worker runs: their variables, values, commands and magics."""

from __future__ import annotations

import os
from typing import Any

import pytest

from notebook_accel.session import cells


def test_a_cell_leaves_its_variables_and_shows_its_value(worker: dict[str, Any], capsys: Any) -> None:
    cells.execute("x = 2\nx + 1", "<cell>")
    cells.execute("x * 10;", "<cell>")
    cells.execute("if x:\n    y = x\n", "<cell>")
    cells.execute("import asyncio\nawait asyncio.sleep(0, 'done')", "<cell>")
    assert capsys.readouterr().out == "Out: 3\nOut: 'done'\n"
    assert worker["y"] == 2 and worker["_"] == "done"


def test_a_task_of_one_cell_goes_on_in_the_next(worker: dict[str, Any]) -> None:
    begin = "import asyncio\ntask = asyncio.create_task(asyncio.sleep(0.05, 'done'))\n"
    cells.execute(f"{begin}await asyncio.sleep(0)\nawait asyncio.sleep(0)", "<cell>")
    cells.execute("found = await task\nawait asyncio.sleep(0)", "<cell>")
    assert worker["found"] == "done"


def test_code_is_timed_as_often_as_is_said(worker: dict[str, Any], capsys: Any) -> None:
    worker["runs"] = runs = []
    shell = cells.CellShell()
    shell.run_line_magic("timeit", "-n2 -r 3 runs.append(1)")
    assert len(runs) == 6 and "best of 3 rounds of 2 loops" in capsys.readouterr().out
    shell.run_line_magic("timeit", "-n 1 -r1 runs.append(-n if (n := 1) else 0)")
    assert runs[6:] == [-1]
    for wrong in ("-o runs", "-n1 -r1 -runs", "-n", "-q runs"):
        with pytest.raises(ValueError, match=r"%timeit -\w+.*: on a worker it knows the options -n NUMBER"):
            shell.run_line_magic("timeit", wrong)


def test_what_stands_beside_timeit_runs_once_a_round(worker: dict[str, Any], capsys: Any) -> None:
    worker["runs"] = runs = []
    cells.CellShell().run_cell_magic("timeit", "-n 3 -r 2 runs.append('setup')", "runs.append('cell')\n")
    assert runs == ["setup", "cell", "cell", "cell"] * 2
    cells.CellShell().run_cell_magic("timeit", "", "1 + 1\n")
    assert "a loop" in capsys.readouterr().out


def test_a_semicolon_in_a_text_hides_nothing(worker: dict[str, Any], capsys: Any) -> None:
    cells.execute("'a;'", "<cell>")
    cells.execute("1;  # hidden", "<cell>")
    cells.execute("", "<cell>")
    assert capsys.readouterr().out == "Out: 'a;'\n"


def test_commands_and_magics_of_a_cell(worker: dict[str, Any], capfd: Any) -> None:
    worker["name"] = "here"
    shell = cells.CellShell()
    shell.system("echo $name {name}")
    assert worker["_exit_code"] == 0
    assert shell.getoutput("printf 'a\\nb'") == ["a", "b"]
    shell.run_line_magic("time", "z = 1")
    assert worker["z"] == 1
    shell.run_line_magic("timeit", "z")
    shell.run_cell_magic("time", "", "z = 2")
    out = capfd.readouterr().out
    assert out.startswith("here here\n") and out.count("wall time") == 2 and "a loop" in out
    assert shell.run_line_magic("pwd", "") == os.getcwd()
    with pytest.raises(NotImplementedError, match="%who works in the notebook itself"):
        shell.run_line_magic("who", "")
    with pytest.raises(NotImplementedError, match="%%html works in"):
        shell.run_cell_magic("html", "", "<b>")
