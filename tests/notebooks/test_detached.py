"""Runs on this machine that outlive their notebook: killed, watched by others, stopped, lost."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.notebooks.conftest import IMPORTS
from tests.notebooks.kernel import Kernel, wait_until
from tests.structure.source import ROOT

pytestmark = [pytest.mark.notebook, pytest.mark.once]

PATIENCE = 120
SETUP = """
from pathlib import Path
from notebook_accel import Accelerator, LaunchError, RunStoppedError, attach, print_metrics, runs

def train(folder, steps=4, wait_at=1):
    accelerator = Accelerator()
    rank = accelerator.process_index
    for step in range(steps):
        print(f"step {step} of rank {rank}", flush=True)
        print_metrics(loss=1 / (step + 1))
        if step == wait_at:
            Path(folder, f"began{rank}").touch()
            while not Path(folder, "go").exists() and not accelerator.should_stop:
                time.sleep(0.02)
        if accelerator.should_stop:
            return f"stopped at {step}"
    return accelerator.gather(torch.tensor([rank + 1.5])).tolist()

def launch(function, *args, **more):
    return notebook_launcher(function, args, **{"num_processes": 2, "detach": True, "view": "text", **more})
"""


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the runs of a test; what still drives one of them is ended with the test."""
    folder = tmp_path / "state"
    monkeypatch.setenv("NOTEBOOK_ACCEL_STATE", str(folder))
    yield folder
    for driver in list_drivers(folder):
        driver.kill()


def list_drivers(state: Path) -> list[psutil.Process]:
    """Return the processes that hold the lock of a run."""
    found = []
    for process in psutil.process_iter():
        try:
            fds = list(Path(f"/proc/{process.pid}/fd").iterdir())
            names = [os.readlink(fd) for fd in fds]
        except OSError:  # it has just ended
            continue
        if any(name.startswith(str(state)) and name.endswith("/lock") for name in names):
            found.append(process)
    return found


@pytest.fixture
def start_kernel(state: Path, tmp_path: Path) -> Iterator[Callable[[], Kernel]]:
    started: list[Kernel] = []

    def start() -> Kernel:
        kernel = Kernel(tmp_path, is_copy=True)
        started.append(kernel)
        kernel.run(IMPORTS + SETUP, timeout=PATIENCE).ok()
        return kernel

    yield start
    for kernel in started:
        kernel.close()


def wait_for_ranks(folder: Path, count: int = 2) -> None:
    files = [folder / f"began{rank}" for rank in range(count)]
    assert wait_until(lambda: all(file.exists() for file in files), PATIENCE)


def test_it_outlives_a_kernel_that_is_killed(
    state: Path, tmp_path: Path, start_kernel: Callable[[], Kernel]
) -> None:
    first = start_kernel()
    cell = first.run(f"run = launch(train, {str(tmp_path)!r}, block=False, name='nightly')").ok()
    said = "[event.text for event in run.record.since(0) if hasattr(event, 'text')]"
    notes = ast.literal_eval(first.run(said).ok().value)
    assert any("notebook_accel.attach(1) shows it again" in note for note in notes), cell.told
    wait_for_ranks(tmp_path)
    (driver,) = list_drivers(state)
    assert os.getsid(driver.pid) == driver.pid
    tree = psutil.Process(first.pid).children(recursive=True)
    assert driver not in tree
    for each in tree:  # as some front ends do, to restart a kernel
        each.kill()
    first.kill()
    first.close()

    second = start_kernel()
    cell = second.run(
        "print('go', flush=True)\nattach(view='text')",
        timeout=PATIENCE,
        during=lambda: (tmp_path / "go").touch(),
    ).ok()
    assert ast.literal_eval(cell.value) == [1.5, 2.5]
    for rank in (0, 1):
        lines = [line for line in cell.lines if line.endswith(f"of rank {rank}")]
        assert lines == [f"[{rank}] step {step} of rank {rank}" for step in range(4)]
    assert wait_until(lambda: not list_drivers(state), 10)
    cell = second.run(
        "again = attach('nightly', block=False, view='none')\n"
        "again.result(), again.status, again.job.name, [row['loss'] for row in again.record.rows()]"
    ).ok()
    value, status, name, losses = ast.literal_eval(cell.value)
    assert (value, status, name) == ([1.5, 2.5], "done", "nightly")
    assert losses == [1.0, 1 / 2, 1 / 3, 1 / 4]


def test_an_interrupt_leaves_it_and_stop_asks_it_to_save(
    state: Path, tmp_path: Path, start_kernel: Callable[[], Kernel]
) -> None:
    kernel = start_kernel()

    def interrupt() -> None:
        wait_for_ranks(tmp_path)
        kernel.interrupt()

    cell = kernel.run(
        f"print('go', flush=True)\nlaunch(train, {str(tmp_path)!r})", timeout=PATIENCE, during=interrupt
    )
    assert cell.error is not None and cell.error[0] == "KeyboardInterrupt"
    assert "run 1 goes on: notebook_accel.attach(1) shows it again" in cell.error[1]
    assert len(list_drivers(state)) == 1
    watcher = start_kernel()
    watcher.run("watched = attach(1, block=False, view='none')").ok()
    cell = kernel.run("runs()[-1].stop()\nruns()[-1].result(), runs()[-1].status", timeout=PATIENCE).ok()
    assert ast.literal_eval(cell.value) == ("stopped at 1", "stopped")
    cell = watcher.run("watched.result(), watched.status", timeout=PATIENCE).ok()
    assert ast.literal_eval(cell.value) == ("stopped at 1", "stopped")


def test_an_error_has_the_lines_of_the_cell_of_another_kernel(
    tmp_path: Path, start_kernel: Callable[[], Kernel]
) -> None:
    first = start_kernel()
    first.run(
        "class Odd(Exception): pass\n"
        "def broken():\n    value = 3\n    raise Odd(f'value is {value}')  # the line\n"
        "run = launch(broken, block=False, view='none')"
    ).ok()
    first.close()
    cell = start_kernel().run("attach()", timeout=PATIENCE)
    assert cell.error is not None and "value is 3" in cell.error[1]
    assert "raise Odd(f'value is {value}')  # the line" in cell.traceback


def test_what_drives_it_is_killed(state: Path, tmp_path: Path, start_kernel: Callable[[], Kernel]) -> None:
    kernel = start_kernel()
    kernel.run(f"run = launch(train, {str(tmp_path)!r}, block=False, view='none')").ok()
    wait_for_ranks(tmp_path)
    (driver,) = list_drivers(state)
    below = driver.children(recursive=True)
    assert len(below) >= 3  # its agent, and the ranks
    driver.kill()
    assert wait_until(lambda: not any(each.is_running() and not is_zombie(each) for each in below), 10)
    cell = kernel.run("run.result()", timeout=PATIENCE)
    assert cell.error is not None and "run 1 is lost" in cell.error[1]
    cell = kernel.run("attach(1, view='text')", timeout=PATIENCE)
    assert cell.error is not None and "run 1 is lost" in cell.error[1]
    assert "[0] step 1 of rank 0" in cell.lines
    listed = command("runs").splitlines()
    assert "lost" in listed[1]


def is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def command(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "notebook_accel", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    return done.stdout


def test_commands_list_watch_stop_and_remove_it(
    state: Path, tmp_path: Path, start_kernel: Callable[[], Kernel]
) -> None:
    kernel = start_kernel()
    kernel.run(f"first = launch(train, {str(tmp_path)!r}, 2, 9, block=False, view='none', name='short')").ok()
    kernel.run("first.result()", timeout=PATIENCE).ok()
    assert command("attach", "short").splitlines()[-1] == "[1.5, 2.5]"
    kernel.run(f"second = launch(train, {str(tmp_path)!r}, block=False, view='none')").ok()
    wait_for_ranks(tmp_path)
    rows = [line.split()[:3] for line in command("runs").splitlines()[1:]]
    assert rows == [["1", "short", "done"], ["2", "train", "running"]]
    assert command("runs", "--prune").splitlines() == ["removed run 1"]
    said = command("attach", "2", "--stop").splitlines()
    assert "[1] step 1 of rank 1" in said and said[-1] == "'stopped at 1'"
    rows = [line.split()[:3] for line in command("runs").splitlines()[1:]]
    assert rows == [["2", "train", "stopped"]]


def test_many_lines_and_large_values_are_there_for_two_who_watch(
    tmp_path: Path, start_kernel: Callable[[], Kernel]
) -> None:
    first, second = start_kernel(), start_kernel()
    first.run(
        "def talk():\n"
        "    for number in range(20_000): print('line', number)\n"
        "    return torch.arange(5_000_000)\n"
        "run = launch(talk, block=False, view='none')"
    ).ok()
    second.run("run = attach(1, block=False, view='none')").ok()
    for kernel in (first, second):
        cell = kernel.run(
            "run.result().sum().item(), run.record.line_counts, run.lines(1)[-1]", timeout=PATIENCE
        )
        total, counts, last = ast.literal_eval(cell.ok().value)
        assert total == 4_999_999 * 5_000_000 // 2
        assert counts == {0: 20_000, 1: 20_000} and last == "line 19999"


def test_workers_start_again_after_a_failure(tmp_path: Path, start_kernel: Callable[[], Kernel]) -> None:
    kernel = start_kernel()
    cell = kernel.run(
        "def fails_once(path):\n"
        "    print('attempt', flush=True)\n"
        "    if not os.path.exists(path):\n"
        "        open(path, 'w').close()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return 'done'\n"
        f"launch(fails_once, {str(tmp_path / 'once')!r}, num_processes=1, max_restarts=2)",
        timeout=PATIENCE,
    ).ok()
    assert cell.value == "'done'" and cell.lines.count("attempt") == 2, cell.stdout


def test_a_format_of_another_version_is_told(
    state: Path, tmp_path: Path, start_kernel: Callable[[], Kernel]
) -> None:
    kernel = start_kernel()
    kernel.run("launch(os.getpid, num_processes=1, returns='none')", timeout=PATIENCE).ok()
    path = state / "runs" / "1" / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": "0.0.1"}))
    cell = kernel.run("attach()")
    assert cell.error is not None and "was written by notebook_accel 0.0.1" in cell.error[1]
    cell = kernel.run("attach('unknown')")
    assert cell.error is not None and "no run unknown is known" in cell.error[1]
    assert "there are 1 (getpid)" in cell.error[1]


def test_a_full_disk_blocks_no_worker_and_no_stop(
    state: Path, tmp_path: Path, start_kernel: Callable[[], Kernel]
) -> None:
    state.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", state]).returncode:
        pytest.skip("only root can make a small file system")
    try:
        kernel = start_kernel()
        kernel.run(
            "def flood(folder):\n"
            "    accelerator = Accelerator()\n"
            "    for number in range(40_000): print('line', number, 'x' * 500)\n"
            "    Path(folder, f'began{accelerator.process_index}').touch()\n"
            "    while not accelerator.should_stop: time.sleep(0.02)\n"
            "    return 'saved'\n"
            f"run = launch(flood, {str(tmp_path)!r}, block=False, view='none')"
        ).ok()
        wait_for_ranks(tmp_path)
        (driver,) = list_drivers(state)
        kernel.run("run.request_stop()").ok()
        time.sleep(2)
        assert list_drivers(state) == [driver], "its end waits for room"
        subprocess.run(["mount", "-o", "remount,size=256m", state], check=True)
        cell = kernel.run("run.result(), run.status, run.record.notice", timeout=PATIENCE).ok()
        value, status, notice = ast.literal_eval(cell.value)
        assert (value, status) == ("saved", "stopped") and "lines are lost here: the disk was full" in notice
        assert wait_until(lambda: not list_drivers(state), 30)
        kernel.close()
    finally:
        for driver in list_drivers(state):
            driver.kill()
        subprocess.run(["umount", "-l", state], check=True)


def test_it_has_what_the_kernel_has_at_the_launch(tmp_path: Path, start_kernel: Callable[[], Kernel]) -> None:
    kernel = start_kernel()
    kernel.run("notebook_launcher(os.getpid, num_processes=1, start_method='fresh')", timeout=PATIENCE).ok()
    cell = kernel.run(
        f"""
        os.environ["OMP_NUM_THREADS"] = "1"
        os.chdir({str(tmp_path)!r})
        shared = torch.zeros(1).share_memory_()

        def see(folder):
            Path(folder, f"began{{Accelerator().process_index}}").touch()
            while not Path(folder, "go").exists():
                time.sleep(0.02)
            umask = os.umask(0)
            return torch.get_num_threads(), shared.item(), os.getcwd() == folder, umask

        run = launch(see, {str(tmp_path)!r}, block=False, view="none")
        """
    ).ok()
    wait_for_ranks(tmp_path)
    kernel.run("shared += 1").ok()
    (tmp_path / "go").touch()
    cell = kernel.run("run.result(), os.umask(0o022)", timeout=PATIENCE).ok()
    (threads, value, is_there, umask), own = ast.literal_eval(cell.value)
    assert (threads, value, is_there) == (1, 0.0, True) and umask == own
