"""Runs in the background: started in one cell, watched and stopped from others."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil
import pytest

from tests.notebooks.conftest import IMPORTS
from tests.notebooks.kernel import Kernel, wait_until

pytestmark = pytest.mark.notebook

LONG = """
from notebook_accel import RunStoppedError, runs

def long(seconds=600):
    end = time.time() + seconds
    while time.time() < end:
        time.sleep(0.01)
    return "the end"
"""
STOPPABLE = """
from notebook_accel import Accelerator
from notebook_accel.launch.supervise import stop_agreement
stop_agreement._ANSWER_SECONDS = 60.0  # a rank may stand still on a busy machine

def train(grace_of_rank_1=0.0):
    accelerator = Accelerator()
    steps = 0
    while not accelerator.should_stop:
        steps += 1
        dist.barrier()
        if steps == 2:
            print("goes on", flush=True)
        if accelerator.process_index == 1:
            time.sleep(0.001)
    return steps
"""


def workers_of(kernel: Kernel) -> list[psutil.Process]:
    found = []
    for process in kernel.children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def test_it_returns_at_once_and_gives_its_value_later(kernel: Kernel) -> None:
    kernel.run(LONG).ok()
    cell = kernel.run("""
        def until_told():
            while not os.path.exists("told"):
                time.sleep(0.01)
            return "the end"
        run = notebook_launcher(until_told, num_processes=2, block=False)
        print(run.status in ("starting", "running"), run)
    """).ok()  # the first one of a kernel may start the agent in the run's thread
    assert cell.lines[-1].startswith("True <Run until_told on 2 processes: ")
    (kernel.folder / "told").touch()
    assert kernel.run("run.result(), run.status, run.failure, run.wait(0), run in runs()").value == (
        "('the end', 'done', None, True, True)"
    )


@pytest.mark.once
def test_workers_have_a_copy_of_a_run_that_they_cannot_wait_for_or_stop(kernel: Kernel) -> None:
    kernel.run(LONG).ok()
    cell = kernel.run("""
        import asyncio
        from notebook_accel import LaunchError
        ended = notebook_launcher(os.getpid, num_processes=1, block=False)
        ended.wait()
        run = notebook_launcher(long, num_processes=2, block=False)
        async def wait(): await run
        def tell():
            told = set()
            for call in (run.stop, run.result, run.wait, lambda: asyncio.run(wait()), lambda: run.wait(1.0)):
                try:
                    call()
                except LaunchError as error:
                    told.add(str(error))
            return told, ended.wait(), ended.result() > 0
        told = notebook_launcher(tell, num_processes=2, start_method="fork")
        while run.status == "starting":
            time.sleep(0.01)
        print(run.status)
        run.stop()
        print(told)
    """).ok()
    sentence = "the run belongs to the process that made it, of which this one is a copy"
    assert cell.lines[-2:] == ["running", repr(({sentence}, True, True))]


def test_what_it_runs_is_taken_as_it_is_at_the_call(kernel: Kernel) -> None:
    kernel.run("""
        word, here = "before", os.getcwd()
        os.environ["WORD"] = "before"
        def speak():
            time.sleep(0.3)
            return word, os.environ["WORD"], os.getcwd() == here, torch.rand(()).item()
        state = torch.get_rng_state()
        run = notebook_launcher(speak, num_processes=2, block=False)
        word = os.environ["WORD"] = "after"
        os.chdir("/")
        torch.manual_seed(17)
    """).ok()
    cell = kernel.run("""
        os.chdir(here)
        torch.set_rng_state(state)
        run.result() == ("before", "before", True, torch.rand(()).item()) or run.result()
    """).ok()
    assert cell.value == "True"


def test_one_process_does_not_hold_up_the_kernel(kernel: Kernel) -> None:
    kernel.run("run = notebook_launcher(os.getpid, num_processes=1, block=False)").ok()
    assert kernel.run("run.result() != os.getpid()").value == "True"


def test_an_error_is_raised_by_result(kernel: Kernel) -> None:
    kernel.run("""
        def fail():
            raise ValueError("no data")
        run = notebook_launcher(fail, num_processes=2, block=False)
        run.wait()
    """).ok()
    cell = kernel.run("run.result()")
    assert cell.error == ("ValueError", "no data")
    assert 'raise ValueError("no data")' in cell.traceback
    assert kernel.run("run.status, type(run.failure).__name__").value == "('failed', 'ValueError')"
    assert "failed, after" in kernel.run("run").value
    again = kernel.run("run.result()")
    assert len(again.traceback.splitlines()) == len(cell.traceback.splitlines()), "it does not grow"


def test_what_cannot_start_is_told_in_the_cell(kernel: Kernel) -> None:
    cell = kernel.run("""
        import threading
        lock = threading.Lock()
        def held():
            return lock
        notebook_launcher(held, num_processes=2, block=False)
    """)
    assert cell.error is not None and cell.error[0] == "ShipError"
    cell = kernel.run("notebook_launcher(os.getpid, num_processes=2, block=False, start_method='fork')")
    assert cell.error is not None and "this process goes on while workers start" in cell.error[1]


def test_stop_ends_workers_that_do_not_ask(kernel: Kernel) -> None:
    kernel.run(LONG).ok()
    kernel.run("run = notebook_launcher(long, num_processes=2, block=False)").ok()
    assert wait_until(lambda: len(workers_of(kernel)) == 2, 120)
    cell = kernel.run("""
        started = time.perf_counter()
        run.stop(grace=600)
        print(run.status, time.perf_counter() - started < 200)  # the function itself would go on for ten minutes
        try:
            run.result()
        except RunStoppedError as error:
            print(error)
    """).ok()
    assert cell.lines[0] == "stopped True"
    assert cell.lines[1].startswith("long was stopped after ")
    assert not workers_of(kernel)


@pytest.mark.once
def test_ranks_that_ask_stop_at_the_same_step_and_return(kernel: Kernel) -> None:
    kernel.run(STOPPABLE).ok()
    for _ in range(3):
        cell = kernel.run("""
            run = notebook_launcher(train, num_processes=3, returns="all", block=False,
                                    environment={"ACCELERATE_USE_CPU": "1"})
            while len(run.lines()) < 3:  # each has asked twice
                time.sleep(0.01)
            run.stop(grace=60)
            print(run.status, len(set(run.result())), run.result()[0] > 1)
        """).ok()
        assert cell.lines[-1] == "stopped 1 True"


def test_two_at_a_time(kernel: Kernel) -> None:
    kernel.run(LONG).ok()
    cell = kernel.run("""
        both = [notebook_launcher(long, (0.5,), num_processes=2, block=False) for _ in range(2)]
        print([run.result() for run in both])
    """).ok()
    assert cell.lines[-1] == "['the end', 'the end']"


SAY_GO = """
import asyncio, threading, traceback

def say_go(main=threading.main_thread().ident):
    while "".join(traceback.format_stack(sys._current_frames()[main])).count(", in wait\\n") < 3:
        time.sleep(0.01)  # until the run waits, and in it an event and its condition; `start` has the last two only
    print("go", flush=True)
"""
IN_THREAD = "threading.Thread(target=say_go).start()\n"
WAITING = {
    "awaited": "asyncio.get_running_loop().call_soon(print, 'go')\nawait run",
    "waited for": f"{IN_THREAD}run.wait()",
    "asked for its value": f"{IN_THREAD}run.result()",
}


@pytest.mark.parametrize("how", WAITING)
def test_an_interrupt_of_a_cell_that_waits_stops_the_run(kernel: Kernel, how: str) -> None:
    kernel.run(LONG + SAY_GO).ok()
    kernel.run("run = notebook_launcher(long, num_processes=2, block=False)").ok()
    assert wait_until(lambda: len(workers_of(kernel)) == 2, 120)
    cell = kernel.run(WAITING[how], during=kernel.interrupt)
    assert cell.error is not None and cell.error[0] in ("KeyboardInterrupt", "CancelledError")
    assert wait_until(lambda: not workers_of(kernel), 60)
    assert kernel.run("run.wait(60), run.status").value == "(True, 'stopped')"


@pytest.mark.once
def test_all_output_goes_to_files_too(kernel: Kernel, tmp_path: Path) -> None:
    cell = kernel.run(f"""
        def speak(word):
            for number in range(3000):
                print(word, number)
            print("to stderr", file=sys.stderr)
        for word in ("first", "second"):
            notebook_launcher(speak, (word,), num_processes=2, output="none", log_dir={str(tmp_path / "logs")!r})
    """).ok()
    assert cell.lines == []
    for rank in (0, 1):
        lines = (tmp_path / "logs" / f"rank_{rank}.log").read_text().splitlines()
        heads = [number for number, line in enumerate(lines) if line.startswith("--- speak, ")]
        assert len(heads) == 2 and heads[0] == 0
        assert [line for line in lines[: heads[1]] if line.startswith("first")] == [
            f"first {i}" for i in range(3000)
        ]
        assert "to stderr" in lines[heads[1] :] and "second 2999" in lines[heads[1] :]


@pytest.mark.once
def test_a_folder_that_cannot_be_one_is_told_at_once(kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cell = kernel.run(
        f"notebook_launcher(os.getpid, num_processes=2, log_dir={str(tmp_path / 'file' / 'x')!r})"
    )
    assert cell.error is not None and cell.error[0] == "ValueError" and "is a file" in cell.error[1]


@pytest.mark.once
def test_a_log_that_cannot_be_written_does_not_end_the_run(kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "logs" / "rank_0.log").mkdir(parents=True)
    cell = kernel.run(f"""
        def speak():
            print("spoken")
            return "the end"
        notebook_launcher(speak, num_processes=2, log_dir={str(tmp_path / "logs")!r})
    """).ok()
    assert cell.value == "'the end'" and sorted(cell.lines) == ["[0] spoken", "[1] spoken"]
    assert cell.stderr.count("is not complete") == 1 and "rank_0.log" in cell.stderr


@pytest.mark.once
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_does_not_end_the_run(kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "rank_0.log").symlink_to("/dev/full")
    cell = kernel.run(f"""
        def speak():
            print("spoken")
            return "the end"
        notebook_launcher(speak, num_processes=2, log_dir={str(tmp_path)!r})
    """).ok()
    assert cell.value == "'the end'"
    assert cell.stderr.count("is not complete") == 1 and "No space left" in cell.stderr


def test_a_folder_that_cannot_be_made_leaves_no_view(kernel: Kernel) -> None:
    cell = kernel.run("notebook_launcher(os.getpid, num_processes=2, block=False, log_dir='/proc/x')")
    assert cell.error is not None and "/proc/x" in cell.error[1]
    assert cell.displays == []


@pytest.mark.once
def test_wrong_numbers_of_seconds_are_told_and_change_nothing(kernel: Kernel) -> None:
    kernel.run(LONG).ok()
    kernel.run("run = notebook_launcher(long, num_processes=2, block=False)").ok()
    for code in (
        "run.wait('1')",
        "run.result('1')",
        "run.stop('1')",
        "run.stop(-1)",
        "run.wait(float('nan'))",
    ):
        cell = kernel.run(code)
        assert cell.error is not None and "seconds" in cell.error[1], code
    assert kernel.run("run.wait(-1), run.status in ('starting', 'running')").value == "(False, True)"
    cell = kernel.run("notebook_launcher(long, num_processes=2, block='no')")
    assert cell.error is not None and cell.error[0] == "TypeError" and "block='no'" in cell.error[1]
    # from a thread, too, it returns when the workers have ended
    code = "t = threading.Thread(target=lambda: (run.stop(0), print(run.is_over)))"
    assert kernel.run(f"import threading\n{code}; t.start(); t.join()").ok().lines == ["True"]


def test_a_run_that_has_ended_stays_as_it_is(kernel: Kernel) -> None:
    cell = kernel.run("""
        run = notebook_launcher(os.getpid, num_processes=2, block=False)
        called = []
        run.when_ended(lambda: 1 / 0)
        run.when_ended(lambda: called.append(run.status))
        run.result()
        run.stop()
        run.wait(), run.status
    """).ok()
    assert cell.value == "(True, 'done')"
    assert wait_until(lambda: kernel.run("called").value == "['done']", 60)


def test_what_ranks_raise_because_they_are_ended_is_no_failure(kernel: Kernel) -> None:
    kernel.run("""
        from notebook_accel import Accelerator, RunStoppedError
        def lose_peer():
            accelerator = Accelerator()
            print("up", flush=True)
            if accelerator.process_index == 1:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # hears that its peer has gone
            dist.recv(torch.ones(1), 1 - accelerator.process_index)
    """).ok()
    cell = kernel.run("""
        run = notebook_launcher(lose_peer, num_processes=2, block=False)
        while len(run.lines()) < 2:
            time.sleep(0.01)
        run.stop(0)
        run.status, type(run.failure) is RunStoppedError, len(run.record.failures)
    """).ok()
    assert cell.value == "('stopped', True, 0)"


def test_a_rank_that_fails_after_it_was_asked_to_stop_has_failed(kernel: Kernel) -> None:
    kernel.run(STOPPABLE).ok()
    cell = kernel.run("""
        def spoil():
            accelerator = Accelerator()
            print("asks", accelerator.should_stop)
            while not accelerator.should_stop:
                time.sleep(0.01)
            raise ValueError("while saving")
        run = notebook_launcher(spoil, num_processes=2, block=False)
        while len(run.lines()) < 2:
            time.sleep(0.01)
        run.stop()
        print(run.status, run)
    """).ok()
    assert cell.lines[-1].startswith("failed <Run spoil on 2 processes: failed, ")
    assert "ValueError: while saving" in cell.lines[-1]


def test_an_interrupt_of_stop_ends_workers_that_take_their_time(kernel: Kernel) -> None:
    kernel.run(STOPPABLE).ok()
    kernel.run("""
        def slow():
            accelerator = Accelerator()
            print("asks", accelerator.should_stop)
            while not accelerator.should_stop:
                time.sleep(0.01)
            open(f"stops{accelerator.process_index}", "w").close()
            time.sleep(600)
        run = notebook_launcher(slow, num_processes=2, block=False)
    """).ok()
    assert wait_until(lambda: kernel.run("str(run.lines()).count('asks False')").value == "2", 120)
    cell = kernel.run(
        """
        import threading
        def say_go():  # once the cell is in `stop`
            while not (os.path.exists("stops0") and os.path.exists("stops1")):
                time.sleep(0.01)
            print("go", flush=True)
        threading.Thread(target=say_go).start()
        run.stop(grace=600)
    """,
        during=kernel.interrupt,
    )
    assert cell.error is not None and cell.error[0] == "KeyboardInterrupt"
    assert kernel.run("run.wait(60), run.status").value == "(True, 'stopped')"


HELD = """
import glob, gc, tempfile, threading

def held():
    gc.collect()
    return (len(os.listdir("/proc/self/fd")), threading.active_count(), len(os.listdir("/dev/shm")),
            sorted(os.listdir(tempfile.gettempdir())))
"""


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_hundred_runs_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    kernel = Kernel(tmp_path, TMPDIR=str(tmp_path / "tmp"))
    try:
        kernel.run(IMPORTS + LONG + HELD).ok()
        code = """
            for number in range({count}):
                assert notebook_launcher(os.getpid, num_processes=2, returns="all", block=False).result() != []
                assert len(set(notebook_launcher(os.getpid, num_processes=2, returns="all"))) == 2
        """
        kernel.run(code.format(count=3)).ok()
        kernel.run("before = held()").ok()
        kernel.run(code.format(count=100), timeout=240).ok()
        # ipykernel closes the sockets that it made for threads that wrote every ten seconds
        same = "after = held(); after[0] <= before[0] and after[1:] == before[1:]"
        assert wait_until(lambda: kernel.run(same).value == "True", 60), kernel.run("before, after").value
        assert wait_until(lambda: not workers_of(kernel), 60)
        assert kernel.run("len(runs()) <= 9").value == "True"
    finally:
        kernel.close()
