"""Runs by ssh that outlive their notebook: a process on the first host drives them, and notebooks copy its files."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes.ends import CUT_SECONDS, assert_gone, assert_in_time, read_pids
from tests.nodes.ssh_hosts import KEEPS, SshHosts
from tests.notebooks.kernel import Kernel, prepare_kernel, wait_until
from tests.notebooks.test_detached import list_drivers
from tests.structure.source import ROOT

pytestmark = [
    pytest.mark.notebook,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    *[pytest.mark.may_leak(kind, reason=reason) for kind, reason in KEEPS.items()],
]

PATIENCE = 180
SETUP = """
import os, time
import torch
from pathlib import Path
from notebook_accel import Accelerator, LaunchError, attach, notebook_launcher, print_metrics, runs
HOSTS = ["node1", "root@node2"]

def launch(function, *args, **more):
    return notebook_launcher(function, args, hosts=HOSTS, **{"detach": True, "view": "text", **more})

def train(folder, steps=4, weights=None):
    accelerator = Accelerator()
    rank = accelerator.process_index
    for step in range(steps):
        print(f"step {step} of rank {rank}", flush=True)
        print_metrics(loss=1.0 / (step + 1))
        if step == 1:
            Path(folder, f"began{rank}").write_text(str(os.getpid()))
            while not Path(folder, "go").exists() and not accelerator.should_stop:
                time.sleep(0.05)
        if accelerator.should_stop:
            return f"stopped at {step}"
    return accelerator.gather(torch.tensor([rank + 1.5])).tolist()
"""


@pytest.fixture(scope="module")
def kernel(hosts: SshHosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    kernel = hosts.start_kernel(tmp_path_factory.mktemp("ssh"))
    with prepare_kernel(kernel, SETUP, timeout=PATIENCE):
        yield kernel


def wait_for_ranks(folder: Path) -> None:
    assert wait_until(lambda: all((folder / f"began{rank}").exists() for rank in (0, 1)), 150)


def test_a_run_on_two_hosts_outlives_its_kernel(hosts: SshHosts, kernel: Kernel, tmp_path: Path) -> None:
    first = hosts.start_kernel(tmp_path)
    try:
        first.run(SETUP, timeout=PATIENCE).ok()
        cell = first.run(
            f"run = launch(train, {str(tmp_path)!r}, name='long', block=False)", timeout=PATIENCE
        ).ok()
        said = first.run("[event.text for event in run.record.since(0) if hasattr(event, 'text')]").ok().value
        number = re.search(
            r"Run (\d+) on node1 goes on without this notebook: notebook_accel.attach\(\1, "
            r"hosts=\['node1'\]\) shows it again",
            said,
        )
        assert number is not None, (said, cell.stdout)
        wait_for_ranks(tmp_path)
        first.kill()
    finally:
        first.close()

    def go_on() -> None:
        (tmp_path / "go").touch()

    code = f"print('go', flush=True)\nattach({number[1]}, hosts=HOSTS, view='text')"
    cell = kernel.run(code, timeout=PATIENCE, during=go_on).ok()
    assert ast.literal_eval(cell.value) == [1.5, 2.5]
    for rank in (0, 1):
        lines = [line for line in cell.lines if line.endswith(f"of rank {rank}")]
        assert lines == [f"[{rank}] step {step} of rank {rank}" for step in range(4)]
    assert re.search(
        r"Run \d+ on node1: long on 2 processes by ssh: node1, root@node2, launched .* ago", cell.stdout
    )
    again = "again = attach('long', hosts=HOSTS, block=False, view='none')\n"
    cell = kernel.run(
        f"{again}again.result(), again.status, [row['loss'] for row in again.record.rows()][-1]",
        timeout=PATIENCE,
    ).ok()
    assert ast.literal_eval(cell.value) == ([1.5, 2.5], "done", 0.25)
    assert wait_until(lambda: not list_drivers(hosts.state), 30), "nothing is left on the hosts"


def test_a_run_is_left_and_stopped_from_elsewhere(hosts: SshHosts, kernel: Kernel, tmp_path: Path) -> None:
    def interrupt() -> None:
        wait_for_ranks(tmp_path)
        kernel.interrupt()

    code = f"print('go', flush=True)\nlaunch(train, {str(tmp_path)!r}, 4, torch.ones(5_000_000))"
    cell = kernel.run(code, timeout=PATIENCE, during=interrupt)
    assert cell.error is not None and cell.error[0] == "KeyboardInterrupt"
    assert re.search(
        r"run \d+ on node1 goes on: notebook_accel.attach\(\d+, hosts=\['node1'\]\)", cell.error[1]
    )
    words = [sys.executable, "-m", "notebook_accel", "attach", "--hosts", "node1,node2", "--stop"]
    environment = {**os.environ, **hosts.environment, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [*hosts.prefix, *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ended.returncode == 0 and "stopped at 1" in ended.stdout, ended
    cell = kernel.run("left = runs()[-1]\nleft.stop()\nleft.result(), left.status", timeout=PATIENCE).ok()
    assert ast.literal_eval(cell.value) == ("stopped at 1", "stopped"), "it is watched again"


def test_a_run_whose_process_is_killed_is_lost(hosts: SshHosts, kernel: Kernel, tmp_path: Path) -> None:
    kernel.run(f"run = launch(train, {str(tmp_path)!r}, block=False)", timeout=PATIENCE).ok()
    wait_for_ranks(tmp_path)
    (driver,) = list_drivers(hosts.state)
    driver.kill()
    cell = kernel.run("run.wait()\nrun.status, str(run.failure), run.lines()", timeout=PATIENCE).ok()
    status, error, lines = ast.literal_eval(cell.value)
    assert status == "failed" and "step 1 of rank 1" in lines, lines
    assert re.match(r"run \d+ on node1 is lost: the process that drives it was ended from outside", error), (
        error
    )


def test_a_host_that_is_cut_off_is_named(hosts: SshHosts, kernel: Kernel, tmp_path: Path) -> None:
    kernel.run(f"run = launch(train, {str(tmp_path)!r}, block=False, max_restarts=1)", timeout=PATIENCE).ok()
    wait_for_ranks(tmp_path)
    try:
        hosts.network.cut(2, up=False)
        since = time.monotonic()
        cell = kernel.run(
            "run.wait()\nrun.status, str(run.failure), run.record.notice", timeout=PATIENCE
        ).ok()
        status, error, notice = ast.literal_eval(cell.value)
        assert_in_time(since)
        assert status == "failed" and "a detached run cannot connect again to root@node2" in notice, notice
        assert (
            "rank 1 (on root@node2" in error and "is lost: host root@node2: nothing has come from it" in error
        )
        assert_gone(read_pids(tmp_path / "began1"), since, 2 * CUT_SECONDS)
    finally:
        hosts.network.cut(2, up=True)


def test_an_error_has_the_lines_of_its_cell(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        def fails():
            if os.environ["RANK"] == "1":
                wrong = {}
                wrong["key"]  # the line
            time.sleep(100)

        launch(fails)
        """,
        timeout=PATIENCE,
    )
    assert cell.error == ("KeyError", "'key'") and 'wrong["key"]  # the line' in cell.traceback
    assert re.search(r"rank 1 \(on root@node2, process \d+\) raised this after \d+\.\d s", cell.told)


def test_much_output_and_a_large_value(kernel: Kernel) -> None:
    """What a run has said lies in several files on its host, and values beside them."""
    cell = kernel.run(
        """
        def talk():
            for number in range(300_000):
                print(f"line {number} {'x' * 90}")
            return torch.full((10_000_000,), 7.0)

        run = launch(talk, name="talk", output="none", block=False, view="none")
        run.wait()
        again = attach("talk", hosts=HOSTS, output="none", block=False, view="none")
        began = time.monotonic()
        again.wait()
        said = [int(line.split()[1]) for line in again.lines(1) if line.startswith("line ")]
        [each.result().sum().item() for each in (run, again)], said[-1], said == sorted(said), again.status
        """,
        timeout=PATIENCE,
    ).ok()
    assert ast.literal_eval(cell.value) == ([7e7, 7e7], 299_999, True, "done")


def test_what_cannot_be_attached_to_or_joined(hosts: SshHosts, kernel: Kernel) -> None:
    cell = kernel.run("attach(98765, hosts=HOSTS)", timeout=PATIENCE)
    assert cell.error == ("LaunchError", "host node1: no run 98765 is known there")
    with hosts.firewall(between_hosts=True):
        cell = kernel.run("launch(os.getpid)", timeout=PATIENCE)
    assert cell.error is not None and cell.error[0] == "LaunchError"
    assert re.match(r"host root@node2: it cannot connect to \S+:\d+ \(", cell.error[1]), cell.error
