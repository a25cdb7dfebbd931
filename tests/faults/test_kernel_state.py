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
        for method in ("fork", "spawn"):
            print(method, notebook_launcher(value, num_processes=2, start_method=method, returns="all", view="none"))
        try:
            notebook_launcher(leave, num_processes=2, view="none")
        except na.WorkerError as error:
            print("left:", error)
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN

        def in_thread():  # there the signal stays ignored
            print("thread", notebook_launcher(value, num_processes=2, returns="all", view="none"))
            try:
                notebook_launcher(leave, num_processes=2, view="none")
            except na.WorkerError as error:
                print("unknown:", error)
        thread = threading.Thread(target=in_thread)
        thread.start()
        thread.join()
        with Session(2) as session:
            print("session", session.run(value, returns="all"))
        """,
        tmp_path,
    )
    for expected in ("fork [0, 1]", "spawn [0, 1]", "thread [0, 1]", "session [0, 1]"):
        assert expected in out, (expected, out)
    assert "left with exit code 3" in out
    assert "unknown: " in out and "ignores SIGCHLD" in out


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
        assert len(runs_own) > 8, runs_own
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


def test_a_fork_holds_no_descriptor_of_a_run_also_where_none_is_free(tmp_path: Path) -> None:
    """What it held would keep the ranks alive without their notebook."""
    out = run(
        """
        import resource
        def list_pipes():
            found = set()
            for name in os.listdir("/proc/self/fd"):
                try:
                    found.add(os.readlink(f"/proc/self/fd/{name}"))
                except OSError:
                    pass
            return {end for end in found if end.startswith(("socket:", "pipe:"))}
        def idle():
            open(f"began{os.environ['RANK']}", "w").close()
            time.sleep(300)
        before = list_pipes()
        run = notebook_launcher(idle, num_processes=2, block=False, view="none")
        wait_until(lambda: os.path.exists("began0") and os.path.exists("began1"), "the ranks begin")
        of_run = list_pipes() - before
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        def count_kept(limit):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            spare = []
            try:
                while limit < hard:
                    spare.append(os.dup(0))
            except OSError:
                pass
            pid = os.fork()
            if not pid:
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
                for fd in spare:
                    os.close(fd)
                os._exit(len(list_pipes() & of_run))
            for fd in spare:
                os.close(fd)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        # the last limit is below descriptors of the run: no file can take the place of these
        kept = [count_kept(hard), count_kept(200), count_kept(20)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        run.stop(0)
        same = len(set(kept)) == 1
        print(same and kept[0] < len(of_run) - 8, kept, len(of_run))  # what is kept is multiprocessing's own
        """,
        tmp_path,
    )
    assert out.splitlines()[-1].startswith("True"), out


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


def test_an_interrupt_ends_the_wait_for_a_fork_server(tmp_path: Path) -> None:
    (tmp_path / "slow_import.py").write_text("import time\nopen('began', 'w').close()\ntime.sleep(300)\n")
    out = run(
        """
        import multiprocessing
        multiprocessing.set_forkserver_preload(["slow_import"])
        def interrupt():
            wait_until(lambda: os.path.exists("began"), "the fork server imports")
            interrupt.at = time.monotonic()
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=interrupt).start()
        try:
            notebook_launcher(os.getpid, num_processes=2, view="none", start_method="forkserver")
        except KeyboardInterrupt:
            print("obeyed" if time.monotonic() - interrupt.at < 100 else "late")
        os.kill(multiprocessing.forkserver._forkserver._forkserver_pid, signal.SIGKILL)
        print(len(notebook_launcher(os.getpid, num_processes=2, view="none", start_method="spawn", returns="all")))
        """,
        tmp_path,
    )
    assert out.splitlines()[-2:] == ["obeyed", "2"], out


@pytest.mark.parametrize("end", ["SIGKILL", "SIGSTOP"])
def test_a_worker_that_never_reads_what_it_shall_do(tmp_path: Path, end: str) -> None:
    """A spawned process gets its work by a pipe, which holds 64 KiB; this is more."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "if '--multiprocessing-fork' in sys.orig_argv:\n"
        "    open('began', 'w').close()\n"
        f"    os.kill(os.getpid(), signal.{end})\n"
    )
    out = run(
        """
        os.environ["PYTHONPATH"] += ":" + os.path.abspath("site")
        def interrupt():
            wait_until(lambda: os.path.exists("began"), "a worker starts")
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGINT)
        if END == "SIGSTOP":
            threading.Thread(target=interrupt).start()
        try:
            notebook_launcher(os.getpid, num_processes=2, start_method="spawn", environment={"LARGE": "x" * 200_000})
        except (na.WorkerKilledError, KeyboardInterrupt) as error:
            print(type(error).__name__)
        """.replace("END", repr(end)),
        tmp_path,
    )
    assert out.splitlines()[-1] == {"SIGKILL": "WorkerKilledError", "SIGSTOP": "KeyboardInterrupt"}[end], out


def test_a_worker_that_does_not_end_is_left_behind(tmp_path: Path) -> None:
    """Nothing here can make a process that outlives SIGKILL: the look for its end is played."""
    out = run(
        """
        from notebook_accel.launch.supervise import end_watch, local_group
        local_group.LocalWorkerGroup.kill_seconds = 1.0
        end_watch.EndWatch.has_ended = lambda self: False
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


def test_sockets_of_killed_workers_are_removed(tmp_path: Path) -> None:
    """A loader's processes have sockets of multiprocessing, which those that are killed cannot remove."""
    out = run(
        """
        import multiprocessing.util, tempfile
        def leave():
            from multiprocessing import connection
            globals()["listener"] = connection.Listener(family="AF_UNIX")
            assert os.path.exists(listener.address)
            os.kill(os.getpid(), signal.SIGKILL)
        def list_all():
            return {os.path.join(at, name) for at, *names in os.walk(tempfile.gettempdir()) for name in sum(names, [])}
        be_patient()
        multiprocessing.util.get_temp_dir()
        for method in ("fork", "forkserver"):
            notebook_launcher(os.getpid, num_processes=2, start_method=method, view="none")
            before = list_all()
            try:
                notebook_launcher(leave, num_processes=2, start_method=method, view="none")
            except na.WorkerKilledError:
                print(method, list_all() - before)
        """,
        tmp_path,
    )
    assert out.splitlines() == ["fork set()", "forkserver set()"], out


@pytest.mark.parametrize("moment", ["between launches", "before a worker"])
def test_the_socket_of_a_killed_fork_server_is_removed(tmp_path: Path, moment: str) -> None:
    out = run(
        """
        import multiprocessing.forkserver, multiprocessing.util
        from notebook_accel.launch.supervise import local_group
        server = multiprocessing.forkserver._forkserver
        def kill():
            os.kill(server._forkserver_pid, signal.SIGKILL)
            os.waitid(os.P_PID, server._forkserver_pid, os.WEXITED | os.WNOWAIT)
        def launch():
            notebook_launcher(os.getpid, num_processes=2, start_method="forkserver", view="none")
            return os.listdir(multiprocessing.util.get_temp_dir())
        before = launch()
        if MOMENT == "between launches":
            kill()
        else:
            prepare_process = local_group.LocalWorkerGroup.prepare_process
            def start_after_a_kill(self, rank, ends):
                if rank == 1:
                    kill()
                return prepare_process(self, rank, ends)
            local_group.LocalWorkerGroup.prepare_process = start_after_a_kill
        try:
            after = launch()
        except na.errors.LaunchError:
            after = os.listdir(multiprocessing.util.get_temp_dir())
        assert before != after
        print(len(before), len(after))
        """.replace("MOMENT", repr(moment)),
        tmp_path,
    )
    before, after = out.split()[-2:]
    assert before == after, out


def test_a_stopped_fork_server_is_told(tmp_path: Path) -> None:
    out = run(
        """
from multiprocessing import forkserver
def launch(): return notebook_launcher(lambda: 5, num_processes=2, start_method="forkserver", view="none")
launch()
pid = forkserver._forkserver._forkserver_pid
os.kill(pid, signal.SIGSTOP)
os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
for start in (launch, lambda: Session(2, start_method="forkserver")):
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


def test_users_own_processes_of_the_fork_server_can_be_interrupted(tmp_path: Path) -> None:
    """Workers that start must not hear interrupts, others have to; the server is the same."""
    out = run(
        """
        del __file__  # as in a notebook: else the processes would run this program
        import multiprocessing
        context = multiprocessing.get_context("forkserver")
        for start in range(2):
            notebook_launcher(os.getpid, num_processes=2, start_method="forkserver", view="none")
            with context.Pool(1) as pool:
                blocked = pool.apply(signal.pthread_sigmask, (signal.SIG_BLOCK, []))
                print(blocked, pool.apply(signal.getsignal, (signal.SIGINT,)))
        """,
        tmp_path,
    )
    assert out.count("set() <built-in function default_int_handler>") == 2, out


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
from multiprocessing import forkserver
from notebook_accel.launch.supervise import fork_server
from notebook_accel.launch.supervise.local_group import LocalWorkerGroup

fork_server._explain_end = lambda check: "its server has ended"  # without its imports once more
with Session(2, start_method="forkserver") as session:
    print("up", session.run(os.getpid) > 0)
del session

def read_signed(fd):
    os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
    raise EOFError

def count():
    gc.collect()
    return len(os.listdir("/proc/self/fd")), sum(type(each) is LocalWorkerGroup for each in gc.get_objects())

before, own, kept = count(), forkserver.read_signed, []
forkserver.read_signed = read_signed
starts = [
    lambda: notebook_launcher(os.getpid, num_processes=2, start_method="forkserver", view="none"),
    lambda: notebook_launcher(os.getpid, num_processes=2, start_method="forkserver", view="none", block=False).result(),
    lambda: Session(2, start_method="forkserver"),
]
for start in starts:
    try:
        start()
    except na.LaunchError as error:
        kept.append(error)
    print("kept", len(kept), count()[1])
forkserver.read_signed = own
after = count()
print("the same" if before[0] - after[0] in (0, 1, 2) else (before, after))  # a new server has its own
""",
        tmp_path,
    )
    assert [f"kept {number} 0" in out for number in range(1, 4)] == [True] * 3 and "the same" in out, out
