"""Every way to have workers, and every way in which their cell or kernel ends: no process is left of any."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.notebooks.conftest import IMPORTS
from tests.notebooks.kernel import SLEEP, Kernel, wait_until

pytestmark = pytest.mark.notebook
SECONDS = 60.0  # in which all workers, and all that they have started, are gone

WORK = """
import ctypes, subprocess, time, os, torch, torch.distributed as dist

def work(folder, hang):
    global kept
    rank = int(os.environ["RANK"])
    kept = iter(torch.utils.data.DataLoader(range(8), num_workers=1))
    next(kept)
    pids = [os.getpid(), subprocess.Popen(["sleep", "300"]).pid, kept._workers[0].pid]
    with open(f"{folder}/part{rank}", "w") as file:
        file.write(" ".join(map(str, pids)))
    os.rename(file.name, f"{folder}/pids{rank}")
    if hang == "sleep":
        time.sleep(300)
    if hang == "c code":
        ctypes.PyDLL(None).sleep(300)  # holds the GIL
    if hang == "collective":
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        dist.recv(torch.zeros(1), src=1 - rank)
"""
SETUP = f"from notebook_accel import Session, current_session\n{IMPORTS}\n{WORK}"
LAUNCH = "notebook_launcher(work, (folder, {hang!r}), num_processes=2, view={view!r}, block={block})"


@dataclass(frozen=True)
class Form:
    """Cells that are run before, and the one that has the workers work; `over` where it does not wait for them."""

    cell: str
    before: tuple[str, ...] = ()
    over: bool = False
    session: bool = False


def launched(hang: str, view: str, wait: str = "", over: bool = False) -> Form:
    call = LAUNCH.format(hang=hang, view=view, block=not wait and not over)
    return Form(f"print('go')\n{'run = ' if over else wait}{call}", over=over)


FORMS = {
    "blocking": launched("c code", "text"),
    "blocking-widget": launched("collective", "widget"),
    "awaited": launched("collective", "text", wait="await "),
    "awaited-widget": launched("sleep", "widget", wait="await "),
    "background": launched("collective", "text", over=True),
    "background-widget": launched("c code", "widget", over=True),
    "session": Form("print('go')\ns.run(work, folder, 'collective')", ("s = Session(2)",), session=True),
    "idle-session": Form(
        "s.run(work, folder, '')", ("s = Session(2, start_method='fresh')",), over=True, session=True
    ),
    "magic": Form(
        "%%distributed\nprint('go')\nwork(folder, 'collective')",
        (
            "%load_ext notebook_accel\n%session 2",
            f"%%distributed\n{WORK}",
            "s = current_session(); s.push(folder=folder)",
        ),
        session=True,
    ),
}


@pytest.fixture(scope="module")
def shared_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    started = Kernel(tmp_path_factory.mktemp("restarted"), is_copy=True)
    yield started
    started.close()


@pytest.fixture
def restarted(shared_kernel: Kernel, request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """A kernel for tests that restart it; where one fails before that, the next one gets it as new."""
    failed = request.session.testsfailed
    yield shared_kernel
    if request.session.testsfailed > failed:
        shared_kernel.restart(now=True)


def prepare(kernel: Kernel, form: Form, folder: Path) -> None:
    kernel.run(f"{SETUP}\nfolder = {str(folder)!r}").ok()
    for cell in form.before:
        kernel.run(cell).ok()


def working(kernel: Kernel, folder: Path) -> list[psutil.Process]:
    """Wait until both workers work; return them and what they have started."""
    files = [folder / "pids0", folder / "pids1"]
    assert wait_until(lambda: all(file.exists() for file in files), 120), kernel.children()
    pids = {int(pid) for file in files for pid in file.read_text().split()}
    assert len(pids) == 6
    wait_until(lambda: {process.pid for process in kernel.children()} <= pids, SECONDS)
    below = kernel.children()
    assert pids == {process.pid for process in below}, "everything that works is the kernel's"
    return below


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE and process.is_running():
                found.append(process)
    return found


def outliving(processes: list[psutil.Process]) -> list[str]:
    """Return what is there after a time, killed then, in words: nothing, if all is well."""
    wait_until(lambda: not alive(processes), SECONDS)
    found = []
    for process in alive(processes):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(f"process {process.pid} of {process.ppid()}: {' '.join(process.cmdline())[:100]}")
            process.kill()
    return found


@pytest.mark.parametrize("name", FORMS)
def test_an_interrupt(kernel: Kernel, tmp_path: Path, name: str) -> None:
    form = FORMS[name]
    prepare(kernel, form, tmp_path)
    started: list[psutil.Process] = []

    def interrupt() -> None:
        started.extend(working(kernel, tmp_path))
        kernel.interrupt()

    cell = kernel.run(form.cell, during=None if form.over else interrupt)
    if not form.over:
        assert cell.error is not None and cell.error[0] in ("KeyboardInterrupt", "CancelledError")
    else:
        started.extend(working(kernel, tmp_path))
        other = kernel.run(SLEEP, during=kernel.interrupt)
        assert other.error is not None and other.error[0] == "KeyboardInterrupt"
        assert kernel.run("'next cell'").ok().value == "'next cell'"
        assert alive(started) == started, "an interrupt of another cell leaves them alone"
        kernel.interrupt()
    if form.over and not form.session:
        assert kernel.run("run.wait(60), run.status").ok().value == "(True, 'stopped')"
    if form.session:
        pids = {int((tmp_path / f"pids{rank}").read_text().split()[0]) for rank in (0, 1)}
        assert set(eval(kernel.run("s.run(os.getpid, returns='all')").ok().value)) == pids
        assert kernel.run("s.run(lambda: (dist.barrier(), dist.get_world_size())[1])").ok().value == "2"
        kernel.run("s.close()").ok()
    assert not outliving(started)
    assert kernel.run("notebook_launcher(lambda: 'works', num_processes=2)").ok().value == "'works'"
    assert not kernel.children()


ENDS = [
    *(pytest.param(name, "kill", marks=pytest.mark.once) for name in FORMS),
    *((name, "restart") for name in FORMS),
]


@pytest.mark.may_leak("children", reason="the kernel that was restarted, which the rows share")
@pytest.mark.may_leak("descriptors", reason="the connections to it")
@pytest.mark.parametrize(("name", "end"), ENDS)
def test_an_end_of_the_kernel(restarted: Kernel, tmp_path: Path, name: str, end: str) -> None:
    kernel = restarted
    prepare(kernel, FORMS[name], tmp_path)
    kernel.client.execute(FORMS[name].cell)
    working(kernel, tmp_path)
    everything = psutil.Process(kernel.pid).children(recursive=True)  # the agent too
    left: list[str] = []
    if end == "kill":
        kernel.kill()
        left = outliving(everything)
    # it is asked to end, and killed where it does not; a server starts one anew too that it finds dead
    kernel.restart(now=end == "kill")
    assert not left and not outliving(everything)
    assert not kernel.children()
