"""A process stands by for the launches of a kernel, so that the first one waits for no import."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.notebooks.kernel import ROOT, SLEEP, Kernel
from tests.notebooks.standing import COPIED, IMPORTS, RANKS, SERVED, USE, find, is_running, wait_for
from tests.stopping import stop

pytestmark = [pytest.mark.notebook, pytest.mark.not_on("darwin", "win32", "no copy of a kernel stands by")]


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel whose torch uses OpenMP's threads, with the usual imports done."""
    started = Kernel(tmp_path, OMP_NUM_THREADS="4")
    started.run(IMPORTS).ok()
    yield started
    started.close()


def test_workers_of_a_used_kernel_are_forks_of_the_copy(kernel: Kernel) -> None:
    pid, is_copy, _ = find(kernel)
    assert is_copy
    kernel.run(USE).ok()
    cell = kernel.run(
        """
        def look():
            import __main__
            return os.getppid(), hasattr(__main__, "secret"), psutil.Process().name(), os.getcwd()
        import psutil
        found = notebook_launcher(look, num_processes=2, returns="all")
        found, os.getcwd(), psutil.Process().name()
        """,
        timeout=120,
    ).ok()
    assert COPIED in cell.stdout
    found, folder, name = eval(cell.value)
    assert found == [(pid, False, name, folder)] * 2
    with_state = kernel.run(
        """
        os.environ["LATER"], factor = "yes", 3
        def see(): return os.environ["LATER"], factor, torch.initial_seed()
        torch.manual_seed(7)
        session = Session(2)
        notebook_launcher(see), notebook_launcher(see, num_processes=2), session.run(see), session.close()
        """,
        timeout=120,
    ).ok()
    assert eval(with_state.value) == (("yes", 3, 7),) * 3 + (None,)


def test_the_copy_holds_nothing_of_the_kernels(kernel: Kernel) -> None:
    pid, _, _ = find(kernel)
    copy = psutil.Process(pid)

    def list_links() -> list[str]:
        links = []
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # a file of a module that it imports
                links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        return [link.partition(":")[0] for link in links if not link.endswith(".pyc")]

    def holds_nothing() -> bool:
        links = list_links()
        return sorted(set(links)) == [os.devnull, "socket"] and links.count("socket") == 1

    wait_for(lambda: holds_nothing() and psutil.Process(pid).name() == "accel-standby")
    assert copy.num_threads() == 1
    assert os.getsid(pid) == pid


@pytest.mark.once
@pytest.mark.parametrize("use", ["", USE], ids=["waits", "serves"])
def test_it_ends_with_a_kernel_that_is_killed(kernel: Kernel, use: str) -> None:
    pid, _, _ = find(kernel)
    if use:
        kernel.run(use).ok()
        kernel.run(RANKS, timeout=120).ok()
    os.kill(kernel.pid, signal.SIGKILL)
    wait_for(lambda: not is_running(pid))


def test_an_interrupt_of_the_kernel_is_none_for_it(kernel: Kernel) -> None:
    pid, _, _ = find(kernel)
    kernel.run(USE).ok()
    cell = kernel.run(SLEEP, during=kernel.interrupt)
    assert cell.error is not None and cell.error[0] == "KeyboardInterrupt"
    again = kernel.run(RANKS, timeout=120).ok()
    assert COPIED in again.stdout and again.value == "['0', '1']"
    assert find(kernel)[0] == pid


@pytest.mark.once
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_was_killed_or_stands_still_is_passed_over(kernel: Kernel, signum: int) -> None:
    kernel.run(USE).ok()
    pid, _, _ = find(kernel)
    wait = f"while psutil.Process({pid}).status() not in ('zombie', 'stopped'): time.sleep(0.001)"
    cell = kernel.run(f"import psutil; os.kill({pid}, {int(signum)})\n{wait}\n{RANKS}", timeout=120).ok()
    assert cell.value == "['0', '1']" and SERVED in cell.stdout
    wait_for(lambda: not psutil.pid_exists(pid))


TAKEN = """
import psutil
from unittest import mock
from notebook_accel.launch.supervise.standby import Standby
hand_over = Standby.hand_over

def kill_then(self, *given):  # what others do is seen too late
    pid = hand_over(self, *given)
    os.kill(pid, {signum})
    while psutil.Process(pid).status() not in ("zombie", "stopped"): time.sleep(0.001)
    return pid

with mock.patch.object(Standby, "hand_over", kill_then):
    value = {ranks}
value
"""


@pytest.mark.once
def test_one_that_is_killed_as_a_launch_takes_it_is_replaced(kernel: Kernel) -> None:
    kernel.run(USE).ok()
    cell = kernel.run(TAKEN.format(signum=int(signal.SIGKILL), ranks=RANKS), timeout=120).ok()
    assert cell.value == "['0', '1']"


@pytest.mark.once
def test_one_that_is_stopped_as_a_launch_takes_it_is_told(kernel: Kernel) -> None:
    kernel.run(USE).ok()
    server = psutil.Process(find(kernel)[0])
    cell = kernel.run(TAKEN.format(signum=int(signal.SIGSTOP), ranks=RANKS), timeout=120)
    server.kill()  # stopped, it would not see the end of its kernel
    assert cell.error is not None and cell.error[0] == "LaunchError"
    assert f"the fork server, from which workers start, is process {server.pid}" in cell.error[1]


def test_one_that_is_stopped_as_workers_start_is_told(kernel: Kernel) -> None:
    kernel.run(USE).ok()
    server = psutil.Process(find(kernel)[0])
    stopped = f"""
    import signal
    from notebook_accel.launch.supervise import fork_server
    start = fork_server.start
    def start_and_stop(*args):
        start(*args)
        os.kill({server.pid}, signal.SIGSTOP)
    fork_server.start = start_and_stop
    """
    kernel.run(stopped).ok()
    cell = kernel.run(RANKS, timeout=120)
    assert cell.error is not None and cell.error[0] == "LaunchError"
    assert f"is process {server.pid}, which is stopped" in cell.error[1]
    kernel.run("fork_server.start = start")
    server.resume()
    assert kernel.run(RANKS, timeout=120).ok().value == "['0', '1']"
    wait_for(lambda: not kernel.children())  # the worker that was asked for in vain ends too


MORE = "import types\nsys.modules.update({f'made_{i}': types.ModuleType('made') for i in range(60)})"


@pytest.mark.once
def test_modules_of_the_users_own_are_imported_by_the_workers(kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import random\ngenerator = random.Random()\ndef answer(): return 1\n")
    kernel.run(f"sys.path.insert(0, {str(tmp_path)!r}); sys.dont_write_bytecode = True; import mine").ok()
    pid, is_copy, _ = find(kernel)
    kernel.run(MORE).ok()  # enough for a newer copy, but for the module
    assert (find(kernel)[:2], is_copy) == ((pid, True), True)
    kernel.run(USE).ok()
    (tmp_path / "mine.py").write_text(
        (tmp_path / "mine.py").read_text().replace("return 1", "return 2  # edited")
    )
    kernel.run("import importlib; importlib.reload(mine)").ok()
    cell = kernel.run("notebook_launcher(mine.answer, num_processes=2)", timeout=120).ok()
    assert cell.value == "2" and COPIED in cell.stdout
    drawn = kernel.run(
        """
        def draw(): import mine; return mine.generator.random()
        notebook_launcher(draw, num_processes=2, returns="all")
        """
    ).ok()
    assert len(set(eval(drawn.value))) == 2


def test_a_newer_copy_takes_the_place_of_an_older_one(kernel: Kernel) -> None:
    first, _, _ = find(kernel)
    kernel.run(MORE).ok()
    second, is_copy, _ = find(kernel)
    assert is_copy and second != first
    assert not psutil.pid_exists(first), "the notebook has waited for its end"
    os.kill(second, signal.SIGKILL)
    wait_for(lambda: psutil.Process(second).status() == psutil.STATUS_ZOMBIE)
    kernel.run("None").ok()
    third, is_copy, _ = find(kernel)
    assert is_copy and third != second and not psutil.pid_exists(second)


@pytest.mark.once
def test_what_libraries_were_told_ends_with_the_kernel(tmp_path: Path) -> None:
    started = Kernel(tmp_path, OMP_NUM_THREADS="4")
    try:
        told = """
        import decimal, warnings
        torch.set_default_dtype(torch.float64); torch.set_grad_enabled(False)
        decimal.getcontext().prec = 5
        """
        started.run(IMPORTS + textwrap.dedent(told)).ok()
        assert find(started)[1]
        cell = started.run(
            """
            import resource
            soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 7
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            os.umask(0o077)
            held = [open(os.devnull) for _ in range(300)]
            def look():
                import decimal, resource, warnings
                with warnings.catch_warnings(record=True) as caught:
                    warnings.warn("old", DeprecationWarning)
                umask = os.umask(0)
                return (
                    torch.get_default_dtype(), torch.is_grad_enabled(), decimal.getcontext().prec,
                    resource.getrlimit(resource.RLIMIT_NOFILE)[0], oct(umask), len(caught),
                )
            torch.set_default_dtype(torch.float32); torch.randn(600, 600) @ torch.randn(600, 600)
            notebook_launcher(look, num_processes=2) == (torch.float32, True, 28, soft, "0o77", 1)
            """,
            timeout=120,
        ).ok()
        assert cell.value == "True" and COPIED in cell.stdout
    finally:
        started.close()


@pytest.mark.once
@pytest.mark.parametrize(
    "before",
    [
        "log = open('log.txt', 'w')",
        "import threading\nthreading.Timer(600, print).start()",
        "import sys; sys.path.insert(0, '.'); sys.dont_write_bytecode = True; import mine",
    ],
    ids=["file", "thread", "module"],
)
def test_beside_what_a_copy_would_share_it_is_a_fresh_process(before: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("data = open(__file__)\ndef read(): return data.readline()\n")
    started = Kernel(tmp_path, OMP_NUM_THREADS="4")
    try:
        started.run(f"{before}\n{IMPORTS}").ok()
        assert not find(started)[1]
        started.run(USE).ok()
        cell = started.run(RANKS, timeout=120).ok()
        assert cell.value == "['0', '1']" and SERVED in cell.stdout
        if "mine" in before:
            assert "data = open" in started.run("notebook_launcher(mine.read, num_processes=2)").ok().value
    finally:
        started.close()


@pytest.mark.once
def test_a_module_that_loads_when_it_is_asked_stays_unloaded(kernel: Kernel) -> None:
    lazy = """
    import types
    class Lazy(types.ModuleType):
        def __getattribute__(self, name): print("loaded", name); raise ImportError(name)
    sys.modules["lazy"] = Lazy("lazy")
    """
    cell = kernel.run(textwrap.dedent(lazy) + MORE).ok()
    assert cell.stdout == cell.stderr == ""


@pytest.mark.once
def test_a_launch_asks_only_what_may_still_import_whether_it_answers(kernel: Kernel) -> None:
    kernel.run(
        """
        from notebook_accel.launch.supervise import fork_server
        asked = []
        wait = fork_server._wait_for_answer
        fork_server._wait_for_answer = lambda check: asked.append(wait(check))
        modules = ["notebook_accel.launch.worker.warm"]
        """
    ).ok()
    kernel.run(USE).ok()
    assert kernel.run("runtime.standby()[0].has_imported(['no_such_module'])").ok().value == "False"
    wait_for(lambda: kernel.run("runtime.standby()[0].has_imported(modules)").ok().value == "True")
    assert kernel.run(RANKS, timeout=120).ok().value == "['0', '1']"
    assert kernel.run("asked").ok().value == "[]"


@pytest.mark.once
def test_a_launch_waits_for_what_imports_the_compiler(kernel: Kernel) -> None:
    pid, _, has_compiler = find(kernel)
    assert not has_compiler
    stop(pid)
    kernel.run(f"standby = runtime.standby()[0]; standby.load_compiler()\n{USE}").ok()
    assert kernel.run("standby.has_imported(['notebook_accel.launch.worker.warm'])").ok().value == "False"
    os.kill(pid, signal.SIGCONT)
    cell = kernel.run(RANKS, timeout=120).ok()
    assert cell.value == "['0', '1']" and COPIED in cell.stdout


INTERRUPTED = """
import signal
events = get_ipython().events
watcher = next(one for one in events.callbacks["post_run_cell"] if type(one).__name__ == "_CellWatcher")
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


def test_an_interrupt_as_a_cell_ends_leaves_one_process(kernel: Kernel) -> None:
    # sent while the work of the package runs: elsewhere it can tear a message that the kernel just writes
    kernel.run(INTERRUPTED).ok()
    for number in range(12):
        more = MORE.replace("made_", f"made_{number}_")
        kernel.run(f"after.append({0.002 + number * 0.004})\n{more}").ok()
    assert len(eval(kernel.run("ended").ok().value)) == 12
    kernel.run("None").ok()
    pid = find(kernel)[0]
    assert [child.pid for child in psutil.Process(kernel.pid).children()] == [pid]


@pytest.mark.parametrize("has_it", [False, True], ids=["kernel without it", "kernel with it"])
def test_a_copy_has_the_compiler_where_something_needs_it(kernel: Kernel, has_it: bool) -> None:
    kernel.run(USE).ok()
    if has_it:  # such as by an optimizer that a cell made, and the copy is an older one
        kernel.run("import torch._dynamo").ok()
    assert find(kernel)[1:] == (True, has_it)
    look = "notebook_launcher(lambda: 'torch._dynamo' in sys.modules, num_processes=2, returns='all')"
    assert kernel.run(look, timeout=120).ok().value == f"[{has_it}, {has_it}]"


@pytest.mark.once
def test_a_function_that_trains_has_the_compiler_loaded_before(kernel: Kernel) -> None:
    assert not find(kernel)[2]
    kernel.run(
        "def train(): torch.ones(2, requires_grad=True).sum().backward(); return 'torch._dynamo' in sys.modules"
    ).ok()
    assert find(kernel)[2]
    kernel.run(USE).ok()
    cell = kernel.run("notebook_launcher(train, num_processes=2)", timeout=120).ok()
    assert COPIED in cell.stdout and cell.value == "True"


@pytest.mark.once
def test_not_by_a_start_method_by_hand_and_not_where_it_is_switched_off(
    kernel: Kernel, tmp_path: Path
) -> None:
    pid = find(kernel)[0]
    by_hand = kernel.run(RANKS[:-1] + ", start_method='forkserver')", timeout=120).ok()
    assert SERVED in by_hand.stdout
    assert not psutil.pid_exists(pid), "nobody needs it beside the fork server"
    started = Kernel(tmp_path, NOTEBOOK_ACCEL_STANDBY="false")
    try:
        started.run(IMPORTS).ok()
        assert started.run("repr(describe())").ok().value == "'None'"
    finally:
        started.close()


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
