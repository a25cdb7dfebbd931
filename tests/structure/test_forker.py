"""A copy of `tests/forker.py` starts as a Python of its own does."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import psutil
import pytest

from tests import forker
from tests.structure.source import ROOT
from tests.unit.clock import wait_until


@pytest.fixture(autouse=True)
def _path_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of these tests look for modules where copies do, as those of other tests."""
    monkeypatch.setenv("PYTHONPATH", forker.CURRENT[-1].environment["PYTHONPATH"])


LOOK = """
import gc, json, multiprocessing.process, os, random, signal, sys, tempfile, threading
main = sys.modules["__main__"]
assert vars(main) is globals()
print(json.dumps({
    "arguments": sys.argv,
    "environment": {name: text for name, text in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
    "folders": [os.getcwd(), multiprocessing.process.ORIGINAL_DIR, tempfile.gettempdir()],
    "handlers": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)],
    "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "main": [main.__name__, getattr(main, "__file__", None), __name__],
    "open": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:3],
    "path": [os.path.abspath(folder) for folder in dict.fromkeys(sys.path)],
    "python": sys.executable,
    "read": sys.stdin.read(),
    "streams": [[stream.encoding, stream.isatty(), stream.line_buffering] for stream in (sys.stdout, sys.stderr)],
    "threads": [thread.name for thread in threading.enumerate()],
}))
sys.exit(3)
"""
ENDS = {
    "an error": "def fail():\n    1 / 0\nfail()",
    "an interrupt": "def wait():\n    raise KeyboardInterrupt\nwait()",
    "an error of a program's own hook": """
import sys
sys.excepthook = lambda kind, error, traceback: print(kind, error, traceback.tb_lineno)
1 / 0
""",
    "an exit with words": "import sys\nsys.exit('words')",
    "an exit function": "import atexit\natexit.register(print, 'over')",
    "a signal": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
    "a thread": "import threading, time\nthreading.Timer(0.1, print, ['late']).start()",
    "a worker": """
import multiprocessing
def work(): print(__name__, flush=True)
if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=work)
        process.start()
        process.join()
        assert process.exitcode == 0
""",
}
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the other systems start every program anew")


def by_both(words: list[str], cwd: Path, env: dict[str, str]) -> list[tuple[int, str, str]]:
    """Return exit code, output and errors of a program that a copy runs, and of one that is started.

    Both read the file `given`, if there is one.
    """
    assert forker.CURRENT[-1].can_start(words, env)
    given = cwd / "given"
    found = []
    for run in (forker.run, partial(subprocess.run, capture_output=True, text=True, start_new_session=True)):
        with open(given if given.exists() else os.devnull) as stdin:
            done = run(words, cwd=cwd, env=env, stdin=stdin, timeout=240)
        found.append((done.returncode, done.stdout, done.stderr))
    return found


@pytest.mark.parametrize("way", ["script", "-c", "-m"])
def test_a_copy_finds_what_a_program_finds(tmp_path: Path, way: str) -> None:
    script = tmp_path / "looks.py"
    script.write_text(LOOK)
    words = {"script": [str(script)], "-c": ["-c", LOOK], "-m": ["-m", "looks"]}[way]
    (tmp_path / "tmp").mkdir()
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "tmp"), "OWN": "1"}
    (tmp_path / "given").write_text("given")
    found = by_both([sys.executable, *words, "--x", "1"], env=variables, cwd=tmp_path)
    (code, out, errors), (fresh_code, fresh_out, fresh_errors) = found
    assert (code, errors) == (fresh_code, fresh_errors) == (3, "")
    ours, theirs = json.loads(out), json.loads(fresh_out)
    assert ours == theirs and ours["read"] == "given"


@pytest.mark.parametrize("name", ENDS)
def test_a_copy_ends_as_a_program_ends(tmp_path: Path, name: str) -> None:
    script = tmp_path / "ends.py"
    script.write_text(ENDS[name])
    copy, fresh = by_both(
        [sys.executable, str(script)], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert copy == fresh


def test_what_python_reads_as_it_starts_is_not_copied() -> None:
    here = {**os.environ, "PYTHONPATH": str(ROOT)}
    can_start = forker.CURRENT[-1].can_start
    assert can_start([sys.executable, "s.py"], here)
    for name in (
        "OMP_NUM_THREADS",
        "PYTHONPATH",
        "PYTHONUTF8",
        "TORCHDYNAMO_DISABLE",
        "NOTEBOOK_ACCEL_AS_ACCELERATE",
    ):
        assert not can_start([sys.executable, "s.py"], {**here, name: "7"})
    assert not can_start([sys.executable, "-S", "s.py"], here)
    assert not can_start(["sh", sys.executable, "s.py"], here)
    with mock.patch.object(os, "getpid", return_value=1):  # a process that was forked
        assert not can_start([sys.executable, "s.py"], here)


def test_an_ended_copy_can_be_asked_and_signalled(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "print('up', flush=True)\nimport time\ntime.sleep(60)"]
    with forker.start(words, stdout=subprocess.PIPE, start_new_session=True, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == process.poll() == -signal.SIGKILL
    process.kill()  # nobody: it is known to have ended


def test_copies_share_no_randomness_and_no_secret() -> None:
    code = (
        "import multiprocessing, random, numpy\n"
        "print(random.random(), numpy.random.random(), multiprocessing.current_process().authkey.hex())"
    )
    first, second = (forker.run([sys.executable, "-c", code], timeout=240).stdout.split() for _ in range(2))
    assert len(first) == len(second) == 3 and not set(first) & set(second)


def test_what_a_copy_cannot_follow_starts_a_fresh_process(tmp_path: Path) -> None:
    for option in ({"preexec_fn": os.getpid}, {"umask": 0}, {"start_new_session": False}):
        with forker.start([sys.executable, "-c", ""], **{"start_new_session": True, **option}) as process:
            assert type(process) is subprocess.Popen


def test_copies_find_what_they_asked_for_alone() -> None:
    code = [sys.executable, "-c", "import sys; print('IPython' in sys.modules)"]
    found = []
    for libraries in (forker.KERNEL, ()):
        with forker.start(
            code, libraries, stdout=subprocess.PIPE, start_new_session=True, text=True
        ) as process:
            found.append(process.communicate(timeout=240)[0])
    assert found == ["True\n", "False\n"]


SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def sleeper() -> Iterator[forker.Copy]:
    """A copy that does nothing, for some minutes."""
    with forker.start(SLEEP, start_new_session=True) as process:
        assert isinstance(process, forker.Copy)
        yield process
        process.kill()


def exit_code(code: int) -> int:
    """Return the exit code of a copy that ends with this one."""
    return forker.run([sys.executable, "-c", f"raise SystemExit({code})"], timeout=240).returncode


def test_an_answer_is_that_to_the_last_question(sleeper: forker.Copy) -> None:
    with (
        mock.patch.object(socket.socket, "recv", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        sleeper.poll()
    assert exit_code(7) == 7 and sleeper.poll() is None


def test_an_error_is_answered_and_the_next_question_too(sleeper: forker.Copy) -> None:
    for question in ({"wait": os.getpid()}, {"libraries": ["no_such_module"]}):
        with pytest.raises(RuntimeError, match=r"ChildProcessError|ModuleNotFoundError"):
            sleeper.host.ask(question)
    assert exit_code(5) == 5 and sleeper.poll() is None


def test_python_asks_nobody_while_it_collects_garbage_nor_in_another_process(sleeper: forker.Copy) -> None:
    with mock.patch.object(sleeper.host, "ask", side_effect=AssertionError):
        assert sleeper._internal_poll(_deadstate=sys.maxsize) is None
        with mock.patch.object(os, "getpid", return_value=1):
            assert sleeper.poll() is None
        with sleeper._waitpid_lock:  # type: ignore[attr-defined]
            assert sleeper.poll() is None


def has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # between the two questions
        return True


def test_a_kernel_ends_with_the_process_that_was_copied(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "ipykernel_launcher", "-f", str(tmp_path / "connection.json")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path)}
    with forker.session():
        kernel = forker.start(
            words,
            forker.KERNEL,
            env={**environment, "JPY_PARENT_PID": str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert isinstance(kernel, forker.Copy) and kernel.host.process is not None
        found = psutil.Process(kernel.pid)
        wait_until((tmp_path / "connection.json").exists)
        kernel.host.process.kill()
        wait_until(lambda: has_ended(found))
        with pytest.raises(RuntimeError, match="has ended"):
            kernel.wait()
        assert kernel.host.process is None
        kernel.returncode = 1  # nobody can know it
        assert exit_code(4) == 4
