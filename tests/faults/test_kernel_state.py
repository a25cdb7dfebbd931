"""Launches and sessions from a process in an odd state: many descriptors, no exit codes, other forks."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.faults.scripts import is_alive, run, start, wait_until
from tests.stopping import stop


def test_more_descriptors_than_select_takes(tmp_path: Path) -> None:
    out = run(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        be_patient()
        held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]

        def train():
            from notebook_accel import Accelerator
            accelerator = Accelerator()
            open(f"began{accelerator.process_index}", "w").close()
            while not accelerator.should_stop:
                time.sleep(0.01)
            return accelerator.num_processes

        run = notebook_launcher(train, num_processes=2, block=False, view="none")
        wait_until(lambda: os.path.exists("began0") and os.path.exists("began1"), "the ranks begin")
        run.stop()
        print("stopped with", run.result())
        with Session(2) as session:
            print("session", session.run(lambda: int(os.environ["RANK"]), returns="all"))
        """,
        tmp_path,
    )
    assert "stopped with" in out and "session [0, 1]" in out


def test_sigchld_is_ignored(tmp_path: Path) -> None:
    out = run(
        """
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        def value(): return int(os.environ["RANK"])
        def leave(): os._exit(3)
        for method in ("fork", "fresh"):
            print(method, notebook_launcher(value, num_processes=2, start_method=method, returns="all", view="none"))
        for method in ("fork", "fresh"):
            try:
                notebook_launcher(leave, num_processes=2, start_method=method, view="none")
            except na.WorkerError as error:
                print(f"{method}:", error)
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
        with Session(2) as session:
            print("session", session.run(value, returns="all"))
        """,
        tmp_path,
    )
    for expected in ("fork [0, 1]", "fresh [0, 1]", "session [0, 1]"):
        assert expected in out, (expected, out)
    lines = {line.partition(":")[0]: line for line in out.splitlines()}
    assert "ignores SIGCHLD" in lines["fork"] and "left with exit code 3" in lines["fresh"]


def test_other_code_waits_for_the_workers(tmp_path: Path) -> None:
    out = run(
        """
        def reap():
            while True:
                try:
                    os.waitpid(-1, 0)
                except ChildProcessError:
                    time.sleep(0.001)
        threading.Thread(target=reap, daemon=True).start()
        def value(): return int(os.environ["RANK"])
        def leave(): os._exit(3)
        print(notebook_launcher(value, num_processes=2, start_method="fork", returns="all", view="none"))
        try:
            notebook_launcher(leave, num_processes=2, start_method="fork", view="none")
        except na.WorkerError as error:
            print("left:", error)
        """,
        tmp_path,
    )
    assert "[0, 1]" in out and "left:" in out


def test_workers_leave_the_processes_of_data_loaders_to_the_kernel(tmp_path: Path) -> None:
    out = run(
        """
        import torch
        from torch.utils.data import DataLoader
        from notebook_accel.data_loader import prepare_data_loader
        options = dict(batch_size=2, num_workers=1, persistent_workers=True)
        raw, prepared = (DataLoader(torch.arange(6), **options) for _ in range(2))
        loaders = [raw, prepare_data_loader(prepared)]
        def read():
            return [([batch.tolist() for batch in each], each._iterator._workers[0].pid) for each in loaders]
        for method in ("fork", "auto"):
            before = read()
            try:
                found = notebook_launcher(read, num_processes=2, start_method=method, view="none", returns="all")
            except ValueError as error:
                print(method, error)
                continue
            batches = [batches for batches, _ in before]
            pids = {pid for rank in [before, *found] for _, pid in rank}
            print(method, [[batches for batches, _ in rank] for rank in found] == [batches] * 2, len(pids))
            print(method, read() == before)
        """,
        tmp_path,
    )
    assert "because worker processes of a data loader or pool serve this process" in out
    assert "auto True 6" in out and "auto True" in out.splitlines(), out


def test_scripts_have_exit_codes_where_sigchld_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nsys.exit(int(sys.argv[1]))\n")
    out = run(
        """
        from notebook_accel.cli.main import main
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        for code in ("0", "3"):
            try:
                main(["launch", "--cpu", "--num_processes", "2", "train.py", code])
            except SystemExit as stop:
                print("exit", stop.code)
        """,
        tmp_path,
    )
    assert [line for line in out.splitlines() if line.startswith("exit ")] == ["exit 0", "exit 3"], out


def test_a_child_that_writes_for_ever_ends_with_its_worker(tmp_path: Path) -> None:
    out = run(
        """
        def leave_child(): return subprocess.Popen(["yes"]).pid
        from tests.faults.scripts import is_alive
        pid = notebook_launcher(leave_child, num_processes=2, view="none")
        wait_until(lambda: not is_alive(pid), "yes has ended")

        def leave_daemon():  # in a group of its own, so it lives on
            return subprocess.Popen(["yes"], start_new_session=True).pid
        pid = notebook_launcher(leave_daemon, num_processes=1, view="none", start_method="fork")
        subprocess.run(f"kill -9 {pid}", shell=True)  # unless SIGPIPE has ended it: nobody reads any more
        print("returned")
        """,
        tmp_path,
    )
    assert "returned" in out  # what the other one was just writing may come behind it


def test_forked_workers_hold_no_descriptor_of_other_runs(tmp_path: Path) -> None:
    """What they held would keep ranks alive without their notebook, and the port of a store taken."""
    out = run(
        """
        def list_open():
            found = {}
            for name in os.listdir("/proc/self/fd"):
                try:
                    found[name] = os.readlink(f"/proc/self/fd/{name}")
                except OSError:
                    pass
            return found
        def look():
            return {end for end in list_open().values() if end.startswith(("socket:", "pipe:"))}
        def idle():
            open(f"began{os.environ['RANK']}", "w").close()
            time.sleep(300)
        mine = os.pipe()  # a user's own descriptors stay
        user = {os.readlink(f"/proc/self/fd/{fd}") for fd in mine}
        before = set(list_open().values())
        run = notebook_launcher(idle, num_processes=2, block=False, view="none")
        wait_until(lambda: os.path.exists("began0") and os.path.exists("began1"), "the ranks begin")
        runs_own = {end for end in set(list_open().values()) - before if end.startswith(("socket:", "pipe:"))}
        rows = []
        for table in ("tcp", "tcp6"):
            with open(f"/proc/self/net/{table}") as file:
                rows += [row.split() for row in list(file)[1:]]
        listens = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}
        runs_own -= {f"socket:[{row[9]}]" for row in rows} - listens  # the store's connections
        assert len(runs_own) > 8 and len(runs_own & listens) == 1, runs_own
        with Session(2, start_method="fork") as session:
            for theirs in session.run(look, returns="all"):
                assert user <= theirs, (user, theirs)
                # the pipe by which multiprocessing's child could see its parent end is not ours
                shared = [end for end in runs_own & theirs if end.startswith("socket:")]
                assert not shared, shared
            child = session.run(lambda: __import__("subprocess").run(
                ["ls", "-l", "/proc/self/fd"], capture_output=True, text=True).stdout)
            print(child)
        import multiprocessing
        context = multiprocessing.get_context("fork")  # a fork of the user's own
        queue = context.Queue()
        process = context.Process(target=lambda: queue.put(look()))
        process.start()
        theirs = queue.get(timeout=120)
        process.join()
        assert user <= theirs and not [end for end in runs_own & theirs if end.startswith("socket:")]
        run.stop()
        run.wait()
        print("clean")
        """,
        tmp_path,
    )
    assert out.splitlines()[-1] == "clean"


def test_what_a_failing_worker_started_ends_without_the_notebook(tmp_path: Path) -> None:
    """The notebook is stopped while the worker ends, then killed: it can end nothing any more."""
    program = start(
        """
        def fail():
            child = subprocess.Popen(["sleep", "300"])
            with open(f"part{os.getpid()}", "w") as file:
                file.write(f"{os.getpid()} {child.pid}")
            os.rename(file.name, "pids")
            wait_until(lambda: os.path.exists("go"), "the test says so")
            raise ValueError("on purpose")
        notebook_launcher(fail, num_processes=2, view="none", start_method="fork")
        """,
        tmp_path,
    )
    try:
        wait_until(lambda: (tmp_path / "pids").exists())
        worker, child = map(int, (tmp_path / "pids").read_text().split())
        stop(program.pid)
        (tmp_path / "go").touch()
        wait_until(lambda: not is_alive(worker))
    finally:
        os.kill(program.pid, signal.SIGKILL)
        program.communicate()
    wait_until(lambda: not is_alive(child))


def test_an_interrupt_ends_the_wait_for_an_agent(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "if 'launch.agent.server' in ' '.join(sys.orig_argv) and not os.path.exists('began'):\n"
        "    open('began', 'w').close()\n"
        "    time.sleep(300)\n"
    )
    out = run(
        """
        os.environ["PYTHONPATH"] += ":" + os.path.abspath("site")
        def interrupt():
            wait_until(lambda: os.path.exists("began"), "the agent starts")
            interrupt.at = time.monotonic()
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=interrupt).start()
        try:
            notebook_launcher(os.getpid, num_processes=2, view="none", start_method="fresh")
        except KeyboardInterrupt:
            print("obeyed" if time.monotonic() - interrupt.at < 100 else "late")
        na.runtime.agents().pop().end()
        print(len(notebook_launcher(os.getpid, num_processes=2, view="none", start_method="fresh", returns="all")))
        """,
        tmp_path,
    )
    assert out.splitlines()[-2:] == ["obeyed", "2"], out


def test_a_worker_that_does_not_end_is_left_behind(tmp_path: Path) -> None:
    """Nothing here can make a process that outlives SIGKILL: the look for its end is played."""
    out = run(
        """
        from notebook_accel.launch.agent.client import AgentWorker
        from notebook_accel.launch.supervise import local_group
        local_group.LocalWorkerGroup.kill_seconds = 1.0
        look = AgentWorker.look
        AgentWorker.look = lambda self: look(self) and False
        def wait(): time.sleep(300)
        run = notebook_launcher(wait, num_processes=2, block=False, view="none", output="none")
        wait_until(lambda: run.status == "running", "it runs")
        run.stop(grace=0.0)
        run.wait(30)
        print(run.status)
        print(run.record.notice)
        """,
        tmp_path,
    )
    lines = out.splitlines()
    assert "stopped" in lines and "was killed and has not ended" in out, out


def test_sockets_of_killed_workers_go_with_the_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader's processes have sockets of multiprocessing, which those that are killed cannot remove."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    out = run(
        """
        import multiprocessing.util, tempfile
        def leave():
            from multiprocessing import connection
            globals()["listener"] = connection.Listener(family="AF_UNIX")
            assert os.path.exists(listener.address)
            os.kill(os.getpid(), signal.SIGKILL)
        be_patient()
        multiprocessing.util.get_temp_dir()
        for method in ("fork", "fresh"):
            notebook_launcher(os.getpid, num_processes=2, start_method=method, view="none")
            before = os.listdir(tempfile.gettempdir())
            try:
                notebook_launcher(leave, num_processes=2, start_method=method, view="none")
            except na.WorkerKilledError:
                print(method, os.listdir(tempfile.gettempdir()) == before)
        """,
        tmp_path,
    )
    assert out.splitlines() == ["fork True", "fresh True"], out
    assert not [path for path in folder.iterdir() if path.name.startswith(("accel-", "pymp-"))]


def test_a_stopped_agent_is_told(tmp_path: Path) -> None:
    out = run(
        """
def launch(): return notebook_launcher(lambda: 5, num_processes=2, start_method="fresh", view="none")
launch()
pid = na.runtime.agents()[0].pid
os.kill(pid, signal.SIGSTOP)
os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
for start in (launch, lambda: Session(2, start_method="fresh")):
    try:
        start()
    except na.errors.LaunchError as error:
        print(f"`kill -CONT {pid}` lets it go on" in str(error))
os.kill(pid, signal.SIGCONT)
print(launch())
""",
        tmp_path,
    )
    assert [line for line in out.splitlines() if line in ("True", "5")] == ["True", "True", "5"], out


def test_a_copy_of_the_process_has_no_session(tmp_path: Path) -> None:
    out = run(
        """
with Session(1, start_method="fork") as session:
    pid = os.fork()
    if not pid:
        for call in (lambda: session.run(os.getpid), session.restart, session.stop):
            try:
                call()
            except na.errors.SessionError as error:
                print(error, flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
    print(session.run(lambda: 5))
""",
        tmp_path,
    )
    told = "the session belongs to the process that made it, of which this one is a copy"
    assert out.splitlines()[-4:] == [told, told, told, "5"]


def test_a_kept_error_of_a_start_keeps_nothing_else(tmp_path: Path) -> None:
    """A notebook keeps the last error, and a user any."""
    out = run(
        """
import gc
from notebook_accel.launch.agent import client
from notebook_accel.launch.supervise.local_group import LocalWorkerGroup

with Session(2, start_method="fresh") as session:
    print("up", session.run(os.getpid) > 0)
del session

def kill_and_look(worker):
    os.kill(worker.agent.pid, signal.SIGKILL)
    return look(worker)

def count():
    gc.collect()
    return len(os.listdir("/proc/self/fd")), sum(type(each) is LocalWorkerGroup for each in gc.get_objects())

before, look, kept = count(), client.AgentWorker.look, []
client.AgentWorker.look = kill_and_look
starts = [
    lambda: notebook_launcher(os.getpid, num_processes=2, start_method="fresh", view="none"),
    lambda: notebook_launcher(os.getpid, num_processes=2, start_method="fresh", view="none", block=False).result(),
    lambda: Session(2, start_method="fresh"),
]
for start in starts:
    os.kill(client.start().pid, signal.SIGSTOP)  # it starts nothing
    try:
        start()
    except na.LaunchError as error:
        kept.append(error)
    print("kept", len(kept), count()[1])
client.AgentWorker.look = look
client.start()
after = count()
print("the same" if before == after else (before, after))
""",
        tmp_path,
    )
    assert [f"kept {number} 0" in out for number in range(1, 4)] == [True] * 3 and "the same" in out, out
