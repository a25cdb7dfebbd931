"""What stands by for launches ends with its kernel, and leaves nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebooks.kernel import Kernel
from tests.notebooks.standing import IMPORTS, RANKS, USE, find, is_running, wait_for

pytestmark = [pytest.mark.notebook, pytest.mark.not_on("darwin", "win32", "no copy of a kernel stands by")]


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel whose torch uses OpenMP's threads, with the usual imports done."""
    started = Kernel(tmp_path, OMP_NUM_THREADS="4")
    started.run(IMPORTS).ok()
    yield started
    started.close()


DETACH = """
def detach():
    heard, said = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.write(said, b"x")
        time.sleep(600)
        os._exit(0)
    os.read(heard, 1)  # before it has its session, it ends with its rank
    return pid
def wait(): return os.getppid()
"""
FORK = "notebook_launcher({}, num_processes=2, returns='all')"
LATER = "notebook_launcher({}, num_processes=2, returns='all', block=False).result()"
SERVE = "notebook_launcher({}, num_processes=2, returns='all', start_method='forkserver')"
DETACHED = {
    "by a fork, beside what stands by": ("[None]", FORK.format("detach")),
    "by a fork, after a run in the background": (LATER.format("wait"), FORK.format("detach")),
    "by a fork, beside a fork server": (SERVE.format("wait"), FORK.format("detach")),
    "by a fork of the copy": (LATER.format("wait"), LATER.format("detach")),
    "by a fork of a fork server": (SERVE.format("wait"), SERVE.format("detach")),
    "by the notebook": (LATER.format("wait"), "[detach()]"),
}


@pytest.mark.once
@pytest.mark.parametrize("how", DETACHED)
def test_it_ends_with_a_kernel_whose_detached_processes_go_on(kernel: Kernel, how: str) -> None:
    """Such a process has what its rank had: it must not have what keeps a server running that is the kernel's."""
    kernel.run(DETACH).ok()
    standby = find(kernel)[0]
    first, second = DETACHED[how]
    servers, detached = eval(kernel.run(f"{first}, {second}", timeout=120).ok().value)
    server = servers[0] or standby
    try:
        assert is_running(server)
        kernel.kill()
        wait_for(lambda: not is_running(server))
        assert all(map(is_running, detached))
    finally:
        for pid in detached:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.once
def test_a_forked_worker_can_have_a_fork_server_of_its_own(kernel: Kernel) -> None:
    """The kernel's is no child of it, so that Python would not let it use that one."""
    cell = kernel.run(
        """
        import multiprocessing, operator
        def ask():
            with multiprocessing.get_context("forkserver").Pool(1) as pool: return pool.apply(operator.add, (1, 2))
        served = notebook_launcher(os.getpid, num_processes=2, start_method="forkserver")
        notebook_launcher(ask, num_processes=2, start_method="fork")
        """,
        timeout=120,
    ).ok()
    assert cell.value == "3"


SHORT = "from multiprocessing import process; process.current_process()._config['tempdir']"


@pytest.mark.once
@pytest.mark.parametrize("how", ["kill", "shut down"])
@pytest.mark.parametrize(
    "launch",
    [RANKS, RANKS[:-1] + ", start_method='forkserver')"],
    ids=["by what stands by", "by a fork server"],
)
def test_the_kernels_folder_of_sockets_goes_with_it(kernel: Kernel, launch: str, how: str) -> None:
    kernel.run(USE).ok()
    kernel.run(launch, timeout=120).ok()
    folder = Path(eval(kernel.run(SHORT).ok().value))
    assert (folder / "owner").exists()
    if how == "shut down":
        kernel.manager.shutdown_kernel(now=False)
    else:
        kernel.kill()
    wait_for(lambda: not folder.exists())


@pytest.mark.once
@pytest.mark.parametrize("before", ["", USE], ids=["beside what stands by", "of a fork server"])
def test_the_workers_folder_goes_with_a_kernel_that_is_killed(
    kernel: Kernel, before: str, tmp_path: Path
) -> None:
    kernel.run(before).ok()
    kernel.run(
        f"""
        def tell():
            from multiprocessing import process, util
            with open({str(tmp_path)!r} + "/part" + os.environ["RANK"], "w") as file:
                file.write(util.get_temp_dir())
            os.rename(file.name, file.name.replace("part", "told"))
            time.sleep(600)
        run = notebook_launcher(tell, num_processes=2, block=False)
        """
    ).ok()
    wait_for(lambda: len(list(tmp_path.glob("told*"))) == 2)
    folders = {Path(path.read_text()) for path in tmp_path.glob("told*")}
    assert all((folder / "owner").exists() for folder in folders)
    kernel.kill()
    wait_for(lambda: not any(folder.exists() for folder in folders))
