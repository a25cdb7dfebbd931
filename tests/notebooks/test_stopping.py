"""Interrupts, kills and what a launch leaves behind."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.notebooks.kernel import METHODS, METHODS_ONCE, Kernel, wait_until

pytestmark = pytest.mark.notebook

HANGS = {
    "python": "time.sleep(3600)",
    "swallows": """
    while True:
        try:
            time.sleep(3600)
        except BaseException:
            pass
""",
    "ignores": """
    signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(3600)
""",
    "collective": """
    dist.init_process_group("gloo")
    dist.recv(torch.zeros(1), src=1 - dist.get_rank())
""",
    "c_code": """
    import ctypes
    ctypes.PyDLL(None).sleep(3600)  # holds the GIL
""",
    "children": """
    import subprocess
    subprocess.Popen(["sleep", "300"])
    subprocess.Popen(["setsid", "sleep", "300"])
    subprocess.run(["sleep", "300"])
""",
    "loader": """
    list(torch.utils.data.DataLoader(Slow(), num_workers=2))
""",
}

SLOW = """
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): time.sleep(3600)
"""


def _hang(name: str) -> str:
    body = HANGS[name].strip("\n")
    start = "    open('started' + os.environ['RANK'], 'w').close()\n    print('go', flush=True)"
    return f"{SLOW}\ndef hang():\n{start}\n{body if body.startswith('    ') else '    ' + body}"


@pytest.mark.parametrize("name", HANGS)
@pytest.mark.parametrize("method", METHODS_ONCE)
def test_interrupt_ends_every_worker(kernel: Kernel, name: str, method: str) -> None:
    kernel.run(_hang(name)).ok()

    own_sessions: list[psutil.Process] = []

    def interrupt() -> None:
        time.sleep(0.4)
        own_sessions.extend(filter(_escaped, kernel.children()))
        kernel.interrupt()

    cell = kernel.run(
        f"notebook_launcher(hang, num_processes=2, output='first', start_method='{method}')", during=interrupt
    )
    for process in own_sessions:  # they live on
        process.kill()
    assert cell.error is not None and cell.error[0] == "KeyboardInterrupt"
    assert wait_until(lambda: not kernel.children(), 60), kernel.children()
    again = kernel.run(f"notebook_launcher(lambda: 'works', num_processes=2, start_method='{method}')").ok()
    assert again.value == "'works'"


def test_a_worker_may_save_its_work_on_interrupt(kernel: Kernel, tmp_path: Path) -> None:
    grace = "from notebook_accel.launch.engines import attempts; attempts.INTERRUPT_GRACE = {}"
    kernel.run(grace.format(60.0)).ok()  # a rank may stand still on a busy machine
    cell = kernel.run(
        f"""
        def save():
            from pathlib import Path
            folder = Path("{tmp_path}")
            try:
                (folder / ("ready" + os.environ["RANK"])).touch()
                while len(list(folder.glob("ready*"))) < 2: time.sleep(0.01)
                print("go", flush=True)
                time.sleep(3600)
            except KeyboardInterrupt:
                open("{tmp_path}/saved" + os.environ["RANK"], "w").close()
                print("saved")
                raise
        notebook_launcher(save, num_processes=2, output="first")
        """,
        during=kernel.interrupt,
    )
    kernel.run(grace.format(1.5)).ok()
    assert cell.error is not None and cell.error[0] == "KeyboardInterrupt"
    assert wait_until(lambda: len(list(tmp_path.glob("saved*"))) == 2, 60)
    assert "saved" in cell.lines


def test_a_second_interrupt_does_not_leave_workers(kernel: Kernel) -> None:
    kernel.run(_hang("ignores")).ok()

    def twice() -> None:
        time.sleep(0.3)
        kernel.interrupt()
        time.sleep(0.3)
        kernel.interrupt()

    cell = kernel.run("notebook_launcher(hang, num_processes=2, output='first')", during=twice)
    assert cell.error is not None and cell.error[0] == "KeyboardInterrupt"
    assert wait_until(lambda: not kernel.children(), 60)


FATAL = [(name, method) for name in ("ignores", "c_code", "children") for method in METHODS]


@pytest.mark.once
@pytest.mark.parametrize(("name", "method"), FATAL)
def test_workers_die_with_the_kernel(fresh_kernel: Kernel, name: str, method: str) -> None:
    kernel = fresh_kernel
    kernel.run(_hang(name)).ok()
    kernel.client.execute(f"notebook_launcher(hang, num_processes=2, start_method='{method}')")
    process = psutil.Process(kernel.pid)
    flags = Path(process.cwd())
    assert wait_until(lambda: len(list(flags.glob("started*"))) == 2, 120), kernel.children()
    if name == "children":  # three of each worker, one of them in a session of its own
        assert wait_until(lambda: _sleeping(kernel) == (6, 2), 120), kernel.children()
    everything = process.children(recursive=True)
    own_sessions = [child for child in kernel.children() if _escaped(child)]
    names = {}
    for child in everything:
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if child not in own_sessions:
                names[child] = f"{child.name()} of {child.ppid()}"
    kernel.kill()
    gone = wait_until(lambda: not any(map(_alive, names)), 60)
    assert gone, [f"{child}: {names[child]}" for child in names if _alive(child)]
    for worker in own_sessions:  # a process that made itself a session escapes a kill of the kernel
        os.kill(worker.pid, signal.SIGKILL)


def _sleeping(kernel: Kernel) -> tuple[int, int]:
    """Return how many children sleep, and how many of them in a session of their own."""
    sleeping = list(filter(_sleeps, kernel.children()))
    return len(sleeping), sum(map(_escaped, sleeping))


def _sleeps(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):  # it has just ended
        return process.name() == "sleep"
    return False


def _escaped(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess, ProcessLookupError):  # it has just ended
        return process.name() == "sleep" and os.getsid(process.pid) == process.pid
    return False


def _alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):  # it has just ended
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


STATE = """
import threading, random, tempfile, multiprocessing, gc, time
def snapshot():
    gc.collect()
    handlers = {s: signal.getsignal(s) for s in signal.valid_signals()}
    threads = sorted(t.name for t in threading.enumerate())
    files = sorted(os.listdir(tempfile.gettempdir()))
    shm = sorted(os.listdir("/dev/shm"))
    fds = {}
    for fd in os.listdir("/proc/self/fd"):
        try: fds[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError: pass
    native = set(os.listdir("/proc/self/task"))
    return dict(handlers=handlers, threads=threads, files=files, shm=shm, fds=fds, native=native,
                environ=dict(os.environ), random=random.getstate(), torch=torch.get_rng_state().tolist(),
                wakeup=signal.set_wakeup_fd(-1), cwd=os.getcwd(), streams=(sys.stdout, sys.stderr, sys.stdin),
                children=[p.name for p in multiprocessing.active_children()], path=list(sys.path))
def compare(a, b):
    # the system lists a thread for a moment after it was joined: only one that stays counts
    new = b["native"] - a["native"]
    for _ in range(1000):
        new &= set(os.listdir("/proc/self/task"))
        if not new: break
        time.sleep(0.01)
    a["native"], b["native"] = set(), new
    different = {k: (a[k], b[k]) for k in a if a[k] != b[k]}
    for k in ("fds", "environ", "handlers"):
        if k in different:
            x, y = a[k].items(), b[k].items()
            different[k] = (sorted(map(str, x - y)), sorted(map(str, y - x)))
    return different
def job(fail):
    dist.init_process_group("gloo")
    dist.barrier()
    if fail and dist.get_rank(): raise ValueError("no")
    if fail: time.sleep(3600)
def cycle(fails=(False, True), **options):
    for fail in fails:
        try: notebook_launcher(job, (fail,), **options)
        except ValueError: pass
"""


@pytest.mark.parametrize(
    ("method", "processes"),
    [
        ("auto", 1),
        ("fork", 2),
        pytest.param("fresh", 2, marks=pytest.mark.once),
    ],
)
def test_the_kernel_is_left_as_it_was(kernel: Kernel, method: str, processes: int) -> None:
    function = "job" if processes == 2 else "lambda fail: None"
    kernel.run(STATE + f"\njob = {function}").ok()
    options = f"num_processes={processes}, start_method='{method}', use_port=None"
    kernel.run(f"cycle([True], {options})").ok()  # the agent stays for the next launch
    # the wakeup descriptor belongs to the kernel's event loop: read and put back
    cell = kernel.run(
        f"""
        before = snapshot(); signal.set_wakeup_fd(before["wakeup"])
        cycle({options})
        after = snapshot(); signal.set_wakeup_fd(after["wakeup"])
        compare(before, after)
        """
    ).ok()
    assert cell.value == "{}"
    assert not kernel.children()
