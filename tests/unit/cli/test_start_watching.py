"""Tests for `notebook-accel launch` with real processes: hangs, whole lines, bars, nodes that join, and how it ends."""

from __future__ import annotations

import os
import pty
import py_compile
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import psutil
import pytest

from notebook_accel import probes
from notebook_accel.launch.supervise import hang_watch
from notebook_accel.stream import inbox
from tests.ports import reserve_port
from tests.structure.source import ROOT
from tests.unit import launching
from tests.unit.clock import wait_until
from tests.unit.launching import TWO, Launched, run

alone = launching.alone

HANGING = """
import os, time
def wait_for_nobody():
    time.sleep(600)
def wait_for_ever():
    time.sleep(600)
print("began", flush=True)
wait_for_nobody() if os.environ["RANK"] == "0" else wait_for_ever()
"""


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the launches of a test wait for ranks that are slow to answer or to go on with a row."""
    monkeypatch.setattr(hang_watch, "_ANSWER_SECONDS", 60.0)
    monkeypatch.setattr(inbox, "_UNFINISHED_SECONDS", 60.0)


def test_a_hang_is_reported_with_each_ranks_line_and_ends_the_run(patient: None) -> None:
    Path("s.py").write_text(HANGING)
    out, errors = run(*TWO, "--hang_timeout=1.5", "--on_hang=raise", "s.py", code=1)
    assert out == "began\nbegan\n"
    lines = [line.removeprefix("notebook-accel: ").strip() for line in errors.splitlines()]
    assert lines[0].startswith("nothing was heard of ranks 0, 1 for ")
    for function, number in (("wait_for_nobody", 4), ("wait_for_ever", 6)):
        assert f"{Path('s.py').resolve()}, line {number}: time.sleep(600)" in lines, function
    assert lines[-1] == "all processes were ended, because nothing went on any more"


def test_a_hang_is_only_told_unless_more_is_asked_for(patient: None) -> None:
    Path("s.py").write_text(
        "import os, time\nwhile not os.path.exists('told'): time.sleep(0.1)\nprint('went on')\n"
    )
    launched = Launched((*TWO, "--hang_timeout=1", "s.py"))
    wait_until(lambda: "nothing was heard of" in launched.errors.read_text())
    Path("told").touch()
    code, out, errors = launched.wait()
    assert (code, out) == (0, "went on\nwent on\n")
    assert errors.count("nothing was heard of ranks 0, 1") == 1


def test_a_report_of_a_hang_does_not_end_a_slow_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An interpreter that starts has no handler yet for the signal by which stacks are shown."""
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text("import os, time\nif 'RANK' in os.environ: time.sleep(4)\n")
    Path("s.py").write_text("print('began')\n")
    monkeypatch.setattr(hang_watch, "_ANSWER_SECONDS", 0.5)
    monkeypatch.setenv("PYTHONPATH", f"{slow}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    out, errors = run(*TWO, "--hang_timeout=1", "--on_hang=raise", "s.py")
    assert out == "began\nbegan\n" and "nothing was heard" not in errors


def test_lines_are_whole_however_they_are_written() -> None:
    Path("s.py").write_text(
        "import os, sys\n"
        "for number in range(200):\n"
        "    for part in ('rank', ' ', os.environ['RANK'], ' ', 'x' * 50, '\\n'):\n"
        "        os.write(1 + number % 2, part.encode())\n"
    )
    out, errors = run(*TWO, "s.py")
    for text in (out, errors):
        assert sorted(set(text.splitlines())) == [f"rank {rank} {'x' * 50}" for rank in range(2)]
        assert text.count("\n") == 200


def test_prefix_and_ranks_to_show_can_be_chosen() -> None:
    Path("s.py").write_text("import sys\nprint('one')\nprint('two', file=sys.stderr)\n")
    words = ("--log_line_prefix_template=${role_name}-${local_rank}: ", "--role=ps", "--output=1")
    assert run(*TWO, *words, "s.py") == ("ps-1: one\n", "ps-1: two\n")


def test_each_rank_has_a_file_of_its_output() -> None:
    Path("s.py").write_text("import os\nprint('of rank', os.environ['RANK'])\n")
    run(*TWO, "--log_dir=logs", "s.py")
    for rank in range(2):
        assert Path(f"logs/rank_{rank}.log").read_text().splitlines()[1:] == [f"of rank {rank}"]


def test_standard_input_is_the_launchers() -> None:
    Path("s.py").write_text("import os, sys\nif os.environ['RANK'] == '0': print(sys.stdin.read())\n")
    Path("typed").write_text("what was piped in")
    descriptor, before = os.open("typed", os.O_RDONLY), os.dup(0)
    try:
        os.dup2(descriptor, 0)
        assert run(*TWO, "s.py") == ("what was piped in\n", "")
    finally:
        os.dup2(before, 0)
        os.close(before)
        os.close(descriptor)


TRANSPARENT = """
import atexit, os, sys, threading
assert not [name for name in sys.modules if name.split(".")[0] in ("torch", "numpy", "click", "pydantic")]
assert "FORK_LAUNCHED" not in os.environ and os.environ["ROLE_NAME"] == "default"
assert os.environ["OMP_NUM_THREADS"] == "7" and sys.flags.hash_randomization == 0
left_open = open(f"file-{os.environ['RANK']}", "w")
left_open.write("kept")
atexit.register(lambda: print("handlers run"))
threading.Thread(target=lambda: print("threads end")).start()
os.system(f"ps -o args= -p {os.getpid()}")
"""


def test_a_script_finds_a_process_of_its_own() -> None:
    Path("s.py").write_text(TRANSPARENT)
    out, errors = run(*TWO, "s.py", "--lr", "3", OMP_NUM_THREADS="7", PYTHONHASHSEED="0")
    assert errors == ""
    assert [Path(f"file-{rank}").read_text() for rank in range(2)] == ["kept", "kept"]
    assert out.count("threads end\n") == out.count("handlers run\n") == 2
    assert out.count(" s.py --lr 3\n") == 2, "it is found by its name in the list of processes"


@pytest.mark.parametrize(
    ("text", "code"),
    [("os._exit(0)", 0), ("os.execvp('true', ['true'])", 0), ("sys.exit('no')", 1), ("os._exit(9)", 9)],
)
def test_the_exit_code_says_how_a_script_ended(text: str, code: int) -> None:
    Path("s.py").write_text(f"import os, sys\n{text}\n")
    run(*TWO, "s.py", code=code)


def test_a_rank_that_failed_runs_its_exit_handlers_and_its_own_hook() -> None:
    Path("s.py").write_text(
        "import atexit, os, sys, time\n"
        "sys.excepthook = lambda kind, error, trace: print('my own words for', error, file=sys.stderr)\n"
        "if os.environ['RANK'] == '1': time.sleep(60)\n"
        "atexit.register(lambda: (time.sleep(1.5), print('saved')))\n"
        "raise ValueError('bad batch')\n"
    )
    out, errors = run(*TWO, "s.py", code=1)
    assert out == "saved\n"
    assert errors.splitlines()[0] == "my own words for bad batch"
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("name", "text", "last"),
    [
        ("s.py", "raise GeneratorExit('an end')", "GeneratorExit: an end"),
        ("s.py", "def f(:", "SyntaxError: invalid syntax"),
        ("runpy.d/s.py", "def f(): raise ValueError('bad')\nf()", "ValueError: bad"),
        ("-m folder.absent", "", "ImportError: No module named folder.absent"),
    ],
)
def test_a_failure_is_shown_without_frames_of_the_launcher(name: str, text: str, last: str) -> None:
    for folder in ("runpy.d", "folder"):
        Path(folder).mkdir()
    if not name.startswith("-"):
        Path(name).write_text(text)
    _, errors = run(*TWO, *name.split(), code=1)
    shown = errors.partition("notebook-accel:")[0]
    assert shown.splitlines()[-1] == last
    assert "main_module.py" not in shown and "runpy>" not in shown and "worker/script.py" not in shown
    assert shown.count(f'File "{Path(name).resolve()}", line ') == len(text.splitlines())


def test_how_a_forked_process_ends_is_left_to_its_parent() -> None:
    Path("s.py").write_text(
        "import os, time\n"
        "if not (child := os.fork()): raise ValueError('in the child')\n"
        "code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "time.sleep(0.5)\n"
        "print('its code is', code)\n"
    )
    out, errors = run(*TWO, "s.py")
    assert out == "its code is 1\n" * 2
    assert errors.count("ValueError: in the child\n") == 2


@pytest.mark.parametrize("name", ["s.pyz", "s.pyc", "folder"])
def test_what_python_runs_besides_texts_runs(name: str) -> None:
    Path("folder").mkdir()
    main, other = Path("folder/__main__.py"), Path("folder/other.py")
    main.write_text(f"import sys\n{'' if name == 's.pyc' else 'import other'}\nprint(__name__, sys.argv)\n")
    other.touch()
    if name == "s.pyz":
        with zipfile.ZipFile(name, "w") as archive:
            archive.write(main, main.name)
            archive.write(other, other.name)
    elif name == "s.pyc":
        py_compile.compile(str(main), name)
    assert run(*TWO, name, "x") == (f"__main__ ['{name}', 'x']\n" * 2, "")


@pytest.mark.parametrize(("closed", "out", "errors"), [(1, "", "b\nb\n"), (2, "a\na\n", "")])
def test_a_launcher_whose_stream_is_closed_shows_the_other(closed: int, out: str, errors: str) -> None:
    Path("s.py").write_text("import sys\nprint('a')\nprint('b', file=sys.stderr)\n")
    command = [sys.executable, "-m", "notebook_accel", "launch", *TWO, "s.py"]
    words = ["sh", "-c", f'exec "$@" {closed}>&-', "sh", *command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, out, errors)


def test_a_script_may_use_a_signal_to_save() -> None:
    Path("s.py").write_text(
        "import os, signal, sys, time\n"
        "def save(*args):\n"
        "    time.sleep(2)\n"
        "    os.write(1, b'saved\\n')\n"  # the signal may come in the middle of a print
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.1)\n"
    )
    launched = Launched((*TWO, "s.py"))
    assert [launched.out.readline() for _ in range(2)] == ["ready\n"] * 2
    os.kill(launched.pid, signal.SIGTERM)
    code, out, errors = launched.wait()
    assert (code, out) == (128 + signal.SIGTERM, "saved\nsaved\n")
    assert errors == "notebook-accel: ended by SIGTERM, with all processes\n"


def test_a_program_is_ended_with_the_launcher() -> None:
    launched = Launched((*TWO, "--no_python", "sh", "-c", "echo $$; exec sleep 60"))
    ranks = [psutil.Process(int(launched.out.readline())) for _ in range(2)]
    os.kill(launched.pid, signal.SIGKILL)
    launched.wait()
    assert not psutil.wait_procs(ranks, timeout=240)[1]


def test_a_launch_inside_a_clusters_own_run() -> None:
    Path("s.py").write_text("import os\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'])\n")
    out, _ = run(*TWO, "s.py", RANK="3", WORLD_SIZE="4")
    assert sorted(out.splitlines()) == ["0 2", "1 2"]


def _in_terminal(*words: str) -> str:
    """Return what a launch writes to a terminal; a file `seen N` says that a row was there."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm", COLUMNS="40")
        os.execv(sys.executable, [sys.executable, "-m", "notebook_accel", "launch", *words])
    written = b""
    try:
        while data := os.read(terminal, 1 << 16):
            written += data
            for number in range(3):
                if f"{number} of 3".encode() in written:
                    Path(f"seen {number}").touch()
            if b"name? " in written and b"Ann" not in written:
                os.write(terminal, b"Ann\n")
    except OSError:  # as Linux ends a terminal
        pass
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0, written
    return written.decode()


def test_a_terminal_shows_bars_and_questions_while_they_stand() -> None:
    Path("s.py").write_text(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1': sys.exit()\n"
        "for number in range(3):\n"
        "    sys.stderr.write(f'\\r{number} of 3'); sys.stderr.flush()\n"
        "    while not os.path.exists(f'seen {number}'): time.sleep(0.01)\n"
        "print('a line')\n"
        "sys.stderr.write('\\r3 of 3\\n')\n"
        "print('hello', input('name? '))\n"
    )
    written = _in_terminal(*TWO, "s.py")
    for text in ("\r\x1b[K0 of 3", "\r\x1b[K1 of 3", "\r\x1b[Ka line\r\n", "3 of 3\r\n", "hello Ann\r\n"):
        assert text in written, (text, written)


def test_nested_bars_of_scripts_are_no_wall_of_lines(patient: None) -> None:
    Path("s.py").write_text(
        "import time\n"
        "from tqdm import tqdm\n"
        "for _ in tqdm(range(2), ascii=True):\n"
        "    for _ in tqdm(range(3), ascii=True, leave=False, mininterval=0): time.sleep(0.01)\n"
        "print('the end')\n"
    )
    out, errors = run(*TWO, "s.py")
    assert out == "the end\n" * 2
    assert [(line[:5], "2/2" in line) for line in errors.splitlines()] == [("100%|", True)] * 2, errors


def test_nodes_join_and_leave_a_range() -> None:
    Path("s.py").write_text(
        "import os, sys, time\n"
        "print('world', os.environ['WORLD_SIZE'], flush=True)\n"
        "while not os.path.exists('done') or os.environ['WORLD_SIZE'] == '1': time.sleep(0.05)\n"
    )
    with reserve_port() as port:
        words = (*TWO, "--num_machines=1:2", "--main_process_ip=127.0.0.1", f"--main_process_port={port}")
        words = (*words, "--rdzv_conf=last_call_timeout=1", "s.py")
        first = Launched(("--machine_rank=0", *words))
        assert first.out.readline() == "world 1\n"
        second = Launched(("--machine_rank=1", *words))
        while (line := second.out.readline()) != "world 2\n":
            assert (
                line == "world 1\n"
            )  # a call that closed before the other was there: the ranks start once more
        Path("done").touch()
        found = [node.wait() for node in (first, second)]
    assert [code for code, _, _ in found] == [0, 0], found
    *before, last = found[0][1].splitlines()
    assert last == "world 2" and set(before) <= {"world 1"}


PATIENT = """
import runpy, sys
from tests.patient_ray import be_patient
be_patient()
sys.argv[0] = "notebook-accel"
runpy.run_module("notebook_accel", run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.may_leak("temp_files", reason="Ray keeps the logs of its sessions")
@pytest.mark.skipif(not probes.is_available("ray"), reason="ray is not installed")
def test_ranks_on_a_ray_cluster() -> None:
    Path("s.py").write_text(
        "import os, sys, time\n"
        "print(os.environ['RANK'], os.environ['WORLD_SIZE'], __name__, sys.argv[2:], flush=True)\n"
        "if os.environ['RANK'] == '0': open(sys.argv[1], 'w')\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
        "if os.environ['RANK'] == '1': raise ValueError('bad batch')\n"
        "time.sleep(60)\n"
    )
    printed = str(Path("printed").resolve())
    command = [sys.executable, "-c", PATIENT, "launch", *TWO, "--engine=ray", "s.py", printed, "--lr"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=250)
    assert done.returncode == 1, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} 2 __main__ ['--lr']" for rank in range(2)]
    assert "ValueError: bad batch" in done.stderr and done.stderr.count("Traceback") == 1
    assert "rank 1 " in done.stderr.splitlines()[-1]


def test_the_end_of_a_script_is_noticed_whatever_the_interval() -> None:
    Path("s.py").write_text("print('ran')\n")
    assert run(*TWO, "--monitor_interval=3600", "s.py")[0] == "ran\n" * 2
