"""Programs that libraries' tests start."""

from __future__ import annotations

import importlib.machinery
import sys
from pathlib import Path

import pytest
from accelerate.test_utils import testing as reference

from notebook_accel.utils import testing_programs
from notebook_accel.utils.testing_programs import (
    SubprocessCallException,
    execute_subprocess_async,
    run_command,
)

PROGRAM = "import sys; print('out'); print('err', file=sys.stderr); sys.exit({})"


def words(code: int) -> list[str]:
    return [sys.executable, "-c", PROGRAM.format(code)]


def test_a_command_runs_to_its_end(tmp_path: Path) -> None:
    assert run_command(words(0)) is None
    assert sorted((run_command(words(0), return_stdout=True) or "").split()) == ["err", "out"]
    shown = run_command([Path(sys.executable), "-c", "import os; print(os.environ['A'])"], True, {"A": "b"})
    assert shown == "b\n"
    with pytest.raises(SubprocessCallException, match=r"(?s)exit code 3.*out"):
        run_command(words(3))


def test_lines_are_shown_and_returned(capsys: pytest.CaptureFixture[str]) -> None:
    found = execute_subprocess_async(words(0))
    assert (found.returncode, found.stdout, found.stderr) == (0, ["out"], ["err"])
    shown = capsys.readouterr()
    assert "Running: " in shown.out and "stdout: out" in shown.out and "stderr: err" in shown.err
    execute_subprocess_async(words(0), quiet=True, echo=False)
    assert capsys.readouterr() == ("", "")
    with pytest.raises(RuntimeError, match=r"(?s)exit code 3.*err"):
        execute_subprocess_async(words(3))


def test_a_program_that_prints_much_on_both_streams_ends() -> None:
    code = "import sys\nfor n in range(20000): print(n); print(n, file=sys.stderr)"
    found = execute_subprocess_async([sys.executable, "-c", code], quiet=True)
    assert found.stdout == found.stderr == [str(number) for number in range(20000)]


def test_names_of_this_worker_are_accelerates(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gw0", "gw3", None):
        if name is None:
            monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
        else:
            monkeypatch.setenv("PYTEST_XDIST_WORKER", name)
        for function in ("pytest_xdist_worker_id", "get_torch_dist_unique_port"):
            assert getattr(testing_programs, function)() == getattr(reference, function)()
    assert testing_programs.DEFAULT_LAUNCH_COMMAND == reference.DEFAULT_LAUNCH_COMMAND


def test_a_path_in_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    path = testing_programs.path_in_accelerate_package("test_utils", "scripts")
    assert path == reference.path_in_accelerate_package("test_utils", "scripts") and path.is_dir()
    monkeypatch.setattr(importlib.machinery.PathFinder, "find_spec", lambda name: None)
    assert testing_programs.path_in_accelerate_package("py.typed").exists(), "of this package"
