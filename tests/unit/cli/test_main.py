"""Tests for the command itself: help that fits the terminal, completion, interrupts while it starts, lost readers."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from notebook_accel.cli import flags
from notebook_accel.cli.main import COMMANDS, OF_ACCELERATE
from notebook_accel.cli.refusal import refuse_errors
from notebook_accel.config.schema import section_title, table
from tests.structure.source import ROOT

COMMAND = [sys.executable, "-m", "notebook_accel"]
# many short sleeps: a signal that comes just before a sleep begins is seen when it ends
SLOW_IMPORT = "import time\nprint('importing', flush=True)\nfor _ in range(600): time.sleep(0.1)\n"


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb", **variables}


def help_of(*words: str, width: int) -> list[str]:
    done = subprocess.run(
        [*COMMAND, *words, "--help"],
        env=environment(COLUMNS=str(width)),
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("words", [("launch",), ("config",), ("config", "update")])
def test_help_has_panels_in_reading_order_and_no_flag_cut_off(words: tuple[str, ...], width: int) -> None:
    lines = help_of(*words, width=width)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width and "…" not in text
    panels = re.findall(r"^╭─ (.*?) ─+╮$", text, re.MULTILINE)
    sections = list(dict.fromkeys(section_title(option) for option in table() if not option.face.expert))
    first = ["Command", "Hardware", "Resources", "Training", "torch.compile"]
    assert panels[:5] == first
    assert [title for title in panels if title in sections] == [
        title for title in sections if title in panels
    ]
    assert {"DeepSpeed", "Float8"} < set(panels)
    for option in flags.options():
        shown = len(
            re.findall(rf"^│ +(?:-\w  |) *--{flags.normalize(str(option.face.flag))} ", text, re.MULTILINE)
        )
        assert shown == (0 if flags.is_hidden(option) else 1), option.name


def completed(folder: Path, *words: str) -> list[str]:
    """Return what bash offers for the last word."""
    program = folder / "notebook-accel"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m notebook_accel "$@"\n')
    program.chmod(0o755)
    script = """
    compopt() { offered=file; }  # bash's own works while somebody presses the key only
    eval "$(_NOTEBOOK_ACCEL_COMPLETE=bash_source notebook-accel)"
    COMP_WORDS=(notebook-accel "$@") COMP_CWORD=$#
    _notebook_accel_completion notebook-accel
    printf '%s\\n' "${COMPREPLY[@]}" $offered
    """
    done = subprocess.run(
        ["bash", "-c", script, "bash", *words],
        env=environment(PATH=f"{folder}{os.pathsep}{os.environ['PATH']}"),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stderr == "" and done.returncode == 0
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["la"], ["launch"]),
        (["launch", "--mixed-p"], ["--mixed-precision"]),
        (["launch", "--mixed_p"], ["--mixed_precision"]),
        (["launch", "--num-m"], ["--num-machines"]),
        (["launch", "--mixed-precision", "b"], ["bf16"]),
        (["launch", "--mixed_precision", ""], ["no", "fp16", "bf16", "fp8"]),
        (["launch", "--cpu", "--use_fsdp", "--fsdp_version", ""], ["1", "2"]),
        (["launch", "--cpu", "tr"], ["file"]),
        (["launch", "--num_processes", "2", "tr"], ["file"]),
        (["launch", "--config_file", "c"], ["file"]),
    ],
    ids=lambda words: " ".join(words),
)
def test_bash_completes_flags_choices_and_files(words: list[str], offered: list[str], tmp_path: Path) -> None:
    assert completed(tmp_path, *words) == offered


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script_too(shell: str) -> None:
    variables = environment(_NOTEBOOK_ACCEL_COMPLETE=f"{shell}_source")
    done = subprocess.run(COMMAND, env=variables, capture_output=True, text=True, timeout=240, check=True)
    assert f"_NOTEBOOK_ACCEL_COMPLETE={shell}_complete" in done.stdout


def test_completion_does_not_wait_for_torch() -> None:
    code = """
import sys
from notebook_accel.__main__ import main
try:
    main()
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""
    variables = environment(
        _NOTEBOOK_ACCEL_COMPLETE="bash_complete", COMP_WORDS="notebook-accel launch --num", COMP_CWORD="2"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=240
    )
    assert "plain,--num-processes" in done.stdout.splitlines()
    assert done.stderr == "False\n"


@pytest.mark.parametrize(
    "words",
    [("launch", "s.py"), ("launch", "--num_processes=2", "s.py"), ("config", "default"), ("env",)],
)
def test_an_interrupt_while_torch_is_imported_ends_the_command_without_a_traceback(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    slow = tmp_path / "slow" / "torch"
    (slow / "distributed").mkdir(parents=True)
    (slow / "__init__.py").write_text(SLOW_IMPORT)
    (tmp_path / "s.py").write_text("")
    variables = environment(PYTHONPATH=os.pathsep.join([str(slow.parent), str(ROOT)]), HF_HOME=str(tmp_path))
    with subprocess.Popen(
        [*COMMAND, *words],
        cwd=tmp_path,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells' background jobs ignore it
    ) as command:
        assert command.stdout is not None and command.stdout.readline() == "importing\n"
        command.send_signal(signal.SIGINT)
        out, errors = command.communicate(timeout=120)
    assert (command.returncode, out, errors) == (130, "", "")


def run_without_reader(folder: Path, stream: str, *words: str, closed: bool = False) -> tuple[int, str]:
    """Run a command of which nobody reads one stream.

    Args:
        folder: of configs and of the script.
        stream: `stdout` or `stderr`. It is a pipe whose reading end is closed before the command starts.
        words: of the command.
        closed: whether the stream itself is closed.

    Returns:
        The exit code, and what is written to the other stream.
    """
    number, other = {"stdout": (1, "stderr"), "stderr": (2, "stdout")}[stream]
    command = ["sh", "-c", f'exec "$@" {number}>&-', "sh", *COMMAND] if closed else COMMAND
    variables = environment(HF_HOME=str(folder))
    variables.pop("PYTHONUNBUFFERED", None)  # with it nothing is left to be written at the end
    reading, writing = os.pipe()
    os.close(reading)
    streams = {stream: writing, other: subprocess.PIPE}
    with subprocess.Popen([*command, *words], env=variables, cwd=folder, text=True, **streams) as process:  # type: ignore[call-overload]
        os.close(writing)
        found = process.communicate(timeout=240)
    return process.returncode, found[0 if other == "stdout" else 1]


ALL_COMMANDS = [(), *((name,) for name in [*COMMANDS, *OF_ACCELERATE]), ("config", "update")]
WRONG = [("nope",), ("launch", "--nope"), ("launch", "none.py"), ("config", "nope"), ("to-fsdp2", "--nope")]


@pytest.mark.parametrize("words", ALL_COMMANDS, ids=" ".join)
def test_a_help_that_nobody_reads_ends_without_a_word(words: tuple[str, ...], tmp_path: Path) -> None:
    assert run_without_reader(tmp_path, "stdout", *words, "--help") == (1, "")


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_an_error_that_nobody_reads_ends_without_a_word(words: tuple[str, ...], tmp_path: Path) -> None:
    code, out = run_without_reader(tmp_path, "stderr", *words)
    assert code == 1 and "Error" not in out
    assert run_without_reader(tmp_path, "stderr", *words, closed=True)[0] == 2


@pytest.mark.parametrize("words", [("--help",), ("launch", "--help"), ("env",)], ids=" ".join)
def test_a_closed_output_is_no_failure(words: tuple[str, ...], tmp_path: Path) -> None:
    assert run_without_reader(tmp_path, "stdout", *words, closed=True) == (0, "")


def test_a_launch_whose_output_nobody_reads_ends_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("print('line', flush=True)")
    words = ("launch", "--cpu", "--num_processes=2", "s.py")
    assert run_without_reader(tmp_path, "stdout", *words) == (1, "")


def test_a_notebook_runs_without_an_output(tmp_path: Path) -> None:
    cells = [nbformat.v4.new_code_cell("print('never seen')")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "x.ipynb")
    code, errors = run_without_reader(tmp_path, "stdout", "launch", "x.ipynb", closed=True)
    assert code == 0 and errors.endswith("wrote x.executed.ipynb\n")


def test_a_table_that_nobody_reads_is_no_refusal() -> None:
    with pytest.raises(BrokenPipeError), refuse_errors():
        raise BrokenPipeError


def test_help_imports_no_torch() -> None:
    code = (
        "import sys\nfrom notebook_accel.cli.main import main\n"
        "try:\n    main(['--help'])\nfinally:\n    assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "estimate-memory" in done.stdout, done.stderr
