"""The agent of a kernel: it starts while nobody waits for it, so that launches wait for no import."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.notebooks.kernel import AGENT, ROOT, SLEEP, Kernel, wait_until
from tests.stopping import stop

pytestmark = [
    pytest.mark.notebook,
    pytest.mark.not_on("darwin", "it starts no worker by a fork of itself"),
]

SECONDS = 60.0
IMPORTS = "import os, sys, time, torch\nfrom notebook_accel import Session, notebook_launcher, runtime"
USE = "secret = torch.randn(600, 600) @ torch.randn(600, 600)\nNone"  # OpenMP's threads: no fork from here on
RANKS = "notebook_launcher(lambda: os.environ['RANK'], num_processes=2, returns='all')"
FOUND = "next((agent.pid for agent in runtime.agents()), None)"


def start(folder: Path) -> Kernel:
    """Start a kernel whose torch has used OpenMP's threads, with the usual imports done."""
    started = Kernel(folder, OMP_NUM_THREADS="4")
    started.run(IMPORTS).ok()
    started.run(USE).ok()
    return started


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with contextlib.closing(start(tmp_path_factory.mktemp("kernel"))) as started:
        yield started


@pytest.fixture
def own_kernel(tmp_path: Path) -> Iterator[Kernel]:
    with contextlib.closing(start(tmp_path)) as started:
        yield started


def find(kernel: Kernel) -> int:
    """Return the process id of the agent."""
    return int(kernel.run(FOUND).ok().value)


def wait_for_imports(kernel: Kernel) -> None:
    assert wait_until(lambda: kernel.run("runtime.agents()[0].is_ready").ok().value == "True", SECONDS)


def is_running(pid: int) -> bool:
    """Return whether a process is there, and is no zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


TIMED = """
import time
from notebook_accel.launch.agent.background import _CellWatcher
ends, watch = [], _CellWatcher.__call__
def timed(self, result=None):
    began = time.thread_time()
    watch(self, result)
    ends.append(time.thread_time() - began)
_CellWatcher.__call__ = timed
"""


def test_it_starts_at_the_end_of_the_first_cell_with_torch(tmp_path: Path) -> None:
    with contextlib.closing(Kernel(tmp_path)) as kernel:
        kernel.run(f"import notebook_accel\nfrom notebook_accel import runtime\n{TIMED}").ok()
        assert kernel.run(f"repr({FOUND})").ok().value == "'None'"
        kernel.run("import torch").ok()
        agent = psutil.Process(find(kernel))
        assert wait_until(lambda: agent.name() == AGENT, SECONDS)
        assert os.getsid(agent.pid) == agent.pid and agent.parent() == psutil.Process(kernel.pid)
        wait_for_imports(kernel)
        assert find(kernel) == agent.pid
        assert float(kernel.run("max(ends)").ok().value) < 0.5, "seconds of the processor that a cell pays"


def test_workers_of_a_used_kernel_are_its_forks(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        import psutil
        def look():
            import __main__
            ours = psutil.Process()
            return [one.pid for one in ours.parents()], hasattr(__main__, "secret"), ours.name(), os.getcwd()
        found = notebook_launcher(look, num_processes=2, returns="all")
        found, os.getcwd(), psutil.Process().name()
        """
    ).ok()
    assert "(fresh)" in cell.stdout
    found, folder, name = eval(cell.value)
    assert all(find(kernel) in parents and rest == [False, name, folder] for parents, *rest in found)
    with_state = kernel.run(
        """
        os.environ["LATER"], factor = "yes", 3
        def see(): return os.environ["LATER"], factor, torch.initial_seed()
        torch.manual_seed(7)
        session = Session(2)
        notebook_launcher(see), notebook_launcher(see, num_processes=2), session.run(see), session.close()
        """
    ).ok()
    assert eval(with_state.value) == (("yes", 3, 7),) * 3 + (None,)


def test_workers_import_nothing_that_an_accelerator_needs(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        def look():
            before = set(sys.modules)
            from notebook_accel import Accelerator
            Accelerator()
            return [name for name in sys.modules if name not in before and ".strategies." not in name]
        notebook_launcher(look, num_processes=2)
        """
    ).ok()
    assert cell.value == "[]"


@pytest.mark.once
def test_what_a_cell_imports_is_imported_ahead(kernel: Kernel) -> None:
    has = "notebook_launcher(lambda: ['yaml' in sys.modules, 'wave' in sys.modules], num_processes=2)"
    assert kernel.run(has).ok().value == "[False, False]"
    kernel.run("import wave, yaml").ok()
    wait_for_imports(kernel)
    agent = psutil.Process(find(kernel))
    assert wait_until(lambda: [one.name() for one in agent.children()] == [AGENT], SECONDS), "a template"
    assert kernel.run(has).ok().value == "[True, False]", "no module of Python itself"


@pytest.mark.once
def test_the_compiler_is_imported_ahead_for_a_function_that_trains(kernel: Kernel) -> None:
    kernel.run("def train(): torch.ones(2, requires_grad=True).sum().backward()").ok()
    wait_for_imports(kernel)
    has = "notebook_launcher(lambda: 'torch._dynamo' in sys.modules, num_processes=2), 'torch._dynamo' in sys.modules"
    assert kernel.run(has).ok().value == "(True, False)"


@pytest.mark.once
@pytest.mark.parametrize(
    ("launch", "end"),
    [
        pytest.param("None", "kill", id="idle, killed"),
        pytest.param(RANKS, "kill", id="used, killed"),
        pytest.param("None", "shut down", id="idle, shut down"),
        pytest.param(RANKS, "restart", id="used, restarted"),
    ],
)
def test_it_ends_with_its_kernel(own_kernel: Kernel, launch: str, end: str) -> None:
    kernel = own_kernel
    kernel.run(launch).ok()
    below = psutil.Process(kernel.pid).children(recursive=True)
    assert find(kernel) in [process.pid for process in below]
    if end == "kill":
        kernel.kill()
    elif end == "restart":
        kernel.restart(now=False)
    else:
        kernel.manager.shutdown_kernel(now=False)
    assert wait_until(lambda: not any(is_running(process.pid) for process in below), SECONDS)


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
"""
DETACHED = {
    "by a fork": "notebook_launcher(detach, num_processes=2, returns='all', start_method='fork')",
    "by a fresh worker": "notebook_launcher(detach, num_processes=2, returns='all', start_method='fresh')",
    "by the notebook": "[detach()]",
}


@pytest.mark.once
@pytest.mark.parametrize("how", DETACHED)
def test_it_ends_with_a_kernel_whose_detached_processes_go_on(tmp_path: Path, how: str) -> None:
    """Such a process has what its rank had: it must not have what keeps the agent running."""
    with contextlib.closing(Kernel(tmp_path)) as kernel:
        kernel.run(f"{IMPORTS}\n{DETACH}").ok()
        agent = find(kernel)
        detached = eval(kernel.run(DETACHED[how]).ok().value)
        try:
            kernel.kill()
            assert wait_until(lambda: not is_running(agent), SECONDS)
            assert all(map(is_running, detached))
        finally:
            for pid in detached:
                os.kill(pid, signal.SIGKILL)


def test_an_interrupt_of_the_kernel_is_none_for_it(kernel: Kernel) -> None:
    agent = find(kernel)
    cell = kernel.run(SLEEP, during=kernel.interrupt)
    assert cell.error is not None and cell.error[0] == "KeyboardInterrupt"
    assert kernel.run(RANKS).ok().value == "['0', '1']"
    assert find(kernel) == agent


def test_one_that_was_killed_is_replaced(kernel: Kernel) -> None:
    kernel.run(RANKS).ok()
    agent, opened = find(kernel), psutil.Process(kernel.pid).num_fds()
    os.kill(agent, signal.SIGKILL)
    assert wait_until(lambda: not is_running(agent), SECONDS)
    assert kernel.run(RANKS).ok().value == "['0', '1']"
    assert find(kernel) != agent
    assert wait_until(lambda: not psutil.pid_exists(agent), SECONDS), "the kernel has waited for it"
    assert wait_until(lambda: psutil.Process(kernel.pid).num_fds() <= opened, SECONDS)


def test_one_that_is_stopped_is_told(kernel: Kernel) -> None:
    agent = psutil.Process(find(kernel))
    stop(agent.pid)
    cell = kernel.run(RANKS)
    assert cell.error == (
        "LaunchError",
        f"the agent, from which workers start, is process {agent.pid}, which is stopped by a signal, SIGSTOP or "
        f"SIGTSTP: `kill -CONT {agent.pid}` lets it go on",
    )
    agent.resume()
    assert kernel.run(RANKS).ok().value == "['0', '1']"
    assert wait_until(lambda: not kernel.children(), SECONDS), "a worker that was asked for in vain ends too"


@pytest.mark.parametrize("template", [False, True], ids=["itself", "a template"])
def test_workers_end_with_one_that_is_killed_and_their_run_says_so(kernel: Kernel, template: bool) -> None:
    if template:
        kernel.run("import networkx").ok()
    agent = find(kernel)
    workers: list[psutil.Process] = []

    def kill() -> None:
        workers.extend(kernel.children())
        os.kill(agent, signal.SIGKILL)

    wait = """
    def wait():
        PartialState().wait_for_everyone()
        if os.environ["RANK"] == "0": print("go", flush=True)
        time.sleep(600)
    notebook_launcher(wait, num_processes=2)
    """
    kernel.run("from notebook_accel import PartialState").ok()
    cell = kernel.run(wait, during=kill, at="go")
    assert cell.error is not None and cell.error[0] == "WorkerError"
    told = [
        f"rank {rank} (process {worker.pid}) is lost: the agent, the process that starts workers, has ended"
        for worker in workers
        for rank in (0, 1)
    ]
    assert cell.error[1] in told
    assert len(workers) == 2
    assert wait_until(lambda: not any(is_running(worker.pid) for worker in workers), SECONDS)
    assert kernel.run(RANKS).ok().value == "['0', '1']"


INTERRUPTED = """
import signal
from notebook_accel.launch.agent import client
events = get_ipython().events
watcher = next(one for one in events.callbacks["post_run_cell"] if "agent" in type(one).__module__)
after, sent, ended = [], [], []
def send(signum, frame):
    sent.append(signum)
    signal.raise_signal(signal.SIGINT)
def look_and_be_interrupted(result):
    if not after:
        return watcher(result)
    try:
        number = len(sent)
        signal.setitimer(signal.ITIMER_REAL, after.pop())
        watcher(result)
        ended.append(len(sent))
        while len(sent) == number:  # it comes later than the work
            time.sleep(0.001)
    except KeyboardInterrupt:
        pass
signal.signal(signal.SIGALRM, send)
events.unregister("post_run_cell", watcher)
events.register("post_run_cell", look_and_be_interrupted)
"""


@pytest.mark.once
def test_an_interrupt_as_a_cell_ends_leaves_one_process(own_kernel: Kernel) -> None:
    kernel = own_kernel
    # sent while the work of the package runs: elsewhere it can tear a message that the kernel just writes
    kernel.run(INTERRUPTED).ok()
    for number in range(12):
        kernel.run(f"client.end(); after.append({0.001 + number * 0.001})").ok()
    assert len(eval(kernel.run("ended").ok().value)) == 12
    kernel.run("None").ok()
    assert [child.pid for child in psutil.Process(kernel.pid).children()] == [find(kernel)]


@pytest.mark.once
def test_the_doctor_names_it(kernel: Kernel) -> None:
    wait_for_imports(kernel)
    kernel.run("%load_ext notebook_accel").ok()
    shown = str(kernel.run("%accel_doctor").ok().outputs)
    assert f"an agent, process {find(kernel)}, starts workers" in shown


@pytest.mark.once
def test_where_it_is_switched_off_a_launch_starts_it(tmp_path: Path) -> None:
    with contextlib.closing(Kernel(tmp_path, NOTEBOOK_ACCEL_AGENT="false")) as kernel:
        kernel.run(IMPORTS).ok()
        kernel.run(USE).ok()
        assert kernel.run(f"repr({FOUND})").ok().value == "'None'"
        for name in ("numpy", "socket", "cloudpickle"):
            (tmp_path / f"{name}.py").write_text("1 / 0")  # no module of its
        assert kernel.run(RANKS[:-1] + ", start_method='fresh')").ok().value == "['0', '1']"
        assert is_running(find(kernel))


@pytest.mark.parametrize("file", ["torch.py", "torch/__init__.py"])
def test_another_module_of_the_name_of_torch_is_named_once(tmp_path: Path, file: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("")
    told = f"the module torch, {tmp_path / file}, is not PyTorch: rename it, and start again"
    kernel = Kernel(tmp_path)
    with contextlib.closing(kernel):
        for code in ("import torch, notebook_accel", "from notebook_accel import Accelerator"):
            assert kernel.run(code).error == ("ImportError", told)
            cell = kernel.run("print('told')").ok()
            assert cell.stdout == "told\n" and cell.stderr == ""
        cell = kernel.run("%load_ext notebook_accel")
        assert told in cell.told
        command = [sys.executable, "-m", "notebook_accel", "doctor"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
        )
        assert (done.returncode, done.stdout, done.stderr) == (1, "", f"Error: {told}\n")
