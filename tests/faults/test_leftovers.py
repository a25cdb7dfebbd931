"""What ranks have started and left running ends with them, although it does not obey; what they share is removed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from .scripts import run

PROGRAM = '''
import os, signal, subprocess, sys, time
from multiprocessing import shared_memory
from pathlib import Path

STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), flush=True)
time.sleep(300)
"""
PASSING = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {STUBBORN!r}])"  # and ends at once

def fork():
    """Start what keeps all descriptors: also that by which Python knows when to remove shared memory."""
    heard, said = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(said, b"x")
        time.sleep(300)
        os._exit(0)
    os.read(heard, 1)
    return pid

def leave(folder):
    """Start three processes that SIGTERM does not end, one of which is nobody's child, and make shared memory."""
    segment = shared_memory.SharedMemory(create=True, size=1000)
    children = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for code in (STUBBORN, PASSING)]
    pids = [child.stdout.readline().decode().strip() for child in children]
    pids.append(str(fork()))
    part = Path(folder, f"{os.getpid()}.part")
    part.write_text(" ".join([*pids, segment.name]))
    part.rename(part.with_suffix(".left"))
'''
CHECK = """
    from pathlib import Path
    from program_of_ranks import leave
    from tests.faults.scripts import is_alive

    be_patient()

    def check(what, shares_tracker=False):
        left = [path.read_text().split() for path in Path(".").glob("*.left")]
        assert len(left) == 2
        for *pids, name in left:
            assert not [pid for pid in pids if is_alive(int(pid))], (what, pids)
            assert shares_tracker or not os.path.exists("/dev/shm/" + name), (what, name)
        for path in Path(".").glob("*.left"):
            path.unlink()
        print("nothing left:", what)
"""


@pytest.mark.parametrize("method", ["fork", "fresh"])
def test_by_a_function(tmp_path: Path, method: str) -> None:
    """A spawned process has no tracker of shared memory of its own: this process's removes it at its end."""
    (tmp_path / "program_of_ranks.py").write_text(PROGRAM)
    out = run(
        f"""{CHECK}
    def fail():
        raise ValueError("on purpose")
    ENDS = {{
        "returns": lambda: 1,
        "raises": fail,
        "exits": lambda: os._exit(3),
        "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    }}
    def work(end):
        leave(".")
        wait_until(lambda: len(list(Path(".").glob("*.left"))) == 2, "the other rank")
        ENDS[end]()
    for end in ENDS:
        try:
            notebook_launcher(work, (end,), num_processes=2, start_method={method!r})
        except (ValueError, na.WorkerError) as error:
            assert end != "returns", error
        else:
            assert end == "returns", end
        check(end, shares_tracker={method!r} == "fresh")
    """,
        tmp_path,
    )
    assert out.count("nothing left") == 4


@pytest.mark.parametrize("code", [0, 3])
def test_by_a_script(tmp_path: Path, code: int) -> None:
    (tmp_path / "program_of_ranks.py").write_text(PROGRAM)
    (tmp_path / "train.py").write_text(f"""
import sys, time
from pathlib import Path
from program_of_ranks import leave
leave(".")
while len(list(Path(".").glob("*.left"))) < 2:
    time.sleep(0.01)
sys.exit({code})
""")
    out = run(
        f"""{CHECK}
    from notebook_accel.cli.main import main
    try:
        main(["launch", "--cpu", "--num_processes", "2", "train.py"])
    except SystemExit as stop:
        print("exit", stop.code)
    check("script")
    """,
        tmp_path,
    )
    assert f"exit {code}\n" in out and "nothing left" in out, out


def test_by_a_session(tmp_path: Path) -> None:
    (tmp_path / "program_of_ranks.py").write_text(PROGRAM)
    out = run(
        f"""{CHECK}
    with Session(2) as session:
        session.run(leave, ".")
    check("session")
    session = Session(2)
    session.run(leave, ".")
    pids = [int(word) for path in Path(".").glob("*.left") for word in path.read_text().split()[:-1]]
    for pid in session._workers.pids.values():
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, pids)), "what killed workers left ends while the session is open")
    session.close()
    check("killed workers")
    """,
        tmp_path,
    )
    assert out.count("nothing left") == 2


RESTLESS = {
    "starts others": "trap '' TERM; while :; do sleep 0.1 & sleep 0.002; done",
    "starts another as it ends": "trap 'sleep 300 & exit' TERM; echo on; sleep 300 & wait",
    "starts the next": "echo on; while :; do sleep 300; done",
}


@pytest.mark.parametrize("how", RESTLESS)
def test_what_goes_on_starting_processes(tmp_path: Path, how: str) -> None:
    out = run(
        f"""
        import psutil
        be_patient()
        def work():
            shell = subprocess.Popen(["sh", "-c", {RESTLESS[how]!r}], stdout=subprocess.PIPE)
            if {how!r} != "starts others":
                shell.stdout.readline()
            return os.getpgid(shell.pid)
        groups = notebook_launcher(work, num_processes=2, returns="all")
        def is_left(process):
            try:
                return os.getpgid(process.pid) in groups and process.status() != "zombie"
            except (OSError, psutil.Error):
                return False
        print(len(set(groups)), list(filter(is_left, psutil.process_iter())))
        """,
        tmp_path,
    )
    assert out.splitlines()[-1] == "2 []", out


def test_a_daemon_that_does_not_obey(tmp_path: Path) -> None:
    """Python itself waits for one for ever, at the end of a process."""
    (tmp_path / "daemons.py").write_text("""
import multiprocessing, os, signal, time

def sleep(said):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    said.send(os.getpid())
    time.sleep(300)

def leave():
    heard, said = multiprocessing.Pipe(False)
    multiprocessing.Process(target=sleep, args=(said,), daemon=True).start()
    return heard.recv()
""")
    out = run(
        """
        from daemons import leave
        from tests.faults.scripts import is_alive
        be_patient()
        pids = notebook_launcher(leave, num_processes=2, returns="all")
        print(len(set(pids)), list(filter(is_alive, pids)))
        """,
        tmp_path,
    )
    assert out.splitlines()[-1] == "2 []", out


def test_sockets_of_killed_loader_workers(tmp_path: Path) -> None:
    """Of launches in this process, with which they go: data loader workers send tensors, as this process does."""
    program = """
        import tempfile, torch.multiprocessing
        tempfile.tempdir = TEMP
        context = torch.multiprocessing.get_context("fork")
        def send(queue):
            queue.put(torch.ones(1000))
            time.sleep(300)
        def train():
            queue = context.Queue()
            worker = context.Process(target=send, args=(queue,))
            worker.start()
            assert queue.get().sum() == 1000
            sockets.update(list_sockets())
            worker.kill()
            worker.join()
        def list_sockets():
            return [name for _, _, names in os.walk(TEMP) for name in names if name.startswith("listener-")]
        sockets = set()
        for _ in range(2):
            notebook_launcher(train, num_processes=1, engine="inprocess")
        print(len(sockets), len(os.listdir(TEMP)))
        """
    with tempfile.TemporaryDirectory() as temp:  # its path is shorter than pytest's
        out = run(program.replace("TEMP", repr(temp)), tmp_path)
        assert out.splitlines()[-1] == "2 1", out
        assert not os.listdir(temp)


def test_what_has_a_session_of_its_own(tmp_path: Path) -> None:
    """It lives on, also where its rank is stopped; torch's keeper of shared memory is such a process."""
    out = run(
        """
        import glob, torch
        from tests.faults.scripts import is_alive
        def work():
            torch.multiprocessing.set_sharing_strategy("file_system")
            tensor = torch.ones(1000)
            tensor.share_memory_()
            rank = os.environ["RANK"]
            with open(f"{rank}.part", "w") as file:
                sleep = subprocess.Popen(["sleep", "300"], start_new_session=True)
                file.write(f"{sleep.pid} {os.getpid()}")
            os.rename(f"{rank}.part", f"{rank}.pid")
            wait_until(lambda: len(glob.glob("*.pid")) == 2, "the other rank")
            if rank == "0":
                raise ValueError("on purpose")
            time.sleep(300)
        try:
            notebook_launcher(work, num_processes=2)
        except ValueError as error:
            print(error)
        pids, ranks = zip(*(map(int, open(name).read().split()) for name in glob.glob("*.pid")))
        print(list(map(is_alive, pids)))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        shared = lambda: [name for rank in ranks for name in glob.glob(f"/dev/shm/torch_{rank}_*")]
        wait_until(lambda: not shared(), "the keeper removes memory of killed ranks")
        print("removed")
        """,
        tmp_path,
    )
    assert out.splitlines()[-2:] == ["[True, True]", "removed"], out
