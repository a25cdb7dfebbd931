"""Workers that stay: calls, errors, interrupts, ends, and what they leave behind."""

from __future__ import annotations

import ast
import os
import re
import signal
import time

import pytest

from tests.notebooks.kernel import Kernel, wait_until

pytestmark = pytest.mark.notebook
IMPORTS = (
    "import threading; from notebook_accel import Session, SessionError, Accelerator, current_session; "
    "from notebook_accel.launch.supervise import stop_agreement; from notebook_accel.session import call; "
    "call._RELEASE_SECONDS = stop_agreement._ANSWER_SECONDS = 60.0"  # on a busy machine a rank may stand still
)


@pytest.fixture(scope="module", params=["auto", "fresh"])
def open_session(request: pytest.FixtureRequest, kernel: Kernel) -> Kernel:
    """The kernel with a session of two processes, `s`, in one way to start and then in the other."""
    start = f"s = Session(2, start_method='{request.param}')"
    kernel.run(f"{IMPORTS}\nif 's' in globals(): s.close()\n{start}").ok()
    return kernel


def test_calls_run_on_every_rank_and_return(open_session: Kernel) -> None:
    kernel = open_session
    cell = kernel.run(
        """
        def total(x, scale=1):
            t = torch.full((2,), float(x + dist.get_rank()))
            dist.all_reduce(t)
            print("rank", dist.get_rank())
            return t * scale
        s.run(total, 1, scale=2, returns="all")
        """
    ).ok()
    assert cell.value == "[tensor([6., 6.]), tensor([6., 6.])]"
    assert sorted(cell.lines) == ["[0] rank 0", "[1] rank 1"]
    assert kernel.run("s.run(dist.get_rank)").ok().value == "0"
    assert kernel.run("s.run(dist.get_rank, returns='none')").ok().value == ""


def test_the_processes_stay_and_are_the_same(open_session: Kernel) -> None:
    values = [open_session.run("s.run(os.getpid, returns='all')").ok().value for _ in range(2)]
    assert values[0] == values[1] == open_session.run("s.pids").ok().value


def test_variables_are_pushed_and_pulled(open_session: Kernel) -> None:
    kernel = open_session
    kernel.run("s.push(words=['a'], table=torch.arange(6).reshape(2, 3)); s.push({'mine': 7}, ranks=1)").ok()
    assert kernel.run("s.pull('table', rank='all')[1].tolist()").ok().value == "[[0, 1, 2], [3, 4, 5]]"
    assert kernel.run("s.pull('mine', rank=1)").ok().value == "7"
    cell = kernel.run("s.pull('mine')")
    assert cell.error is not None and cell.error[0] == "NameError" and "no variable 'mine'" in cell.error[1]


def test_functions_see_the_workers_variables_and_leave_theirs(open_session: Kernel) -> None:
    cell = open_session.run(
        """
        s.push(offset=100)
        def remember():
            global found
            found = offset + dist.get_rank()
        s.run(remember)
        s.pull("found", rank="all")
        """
    ).ok()
    assert cell.value == "[100, 101]"


def test_big_values_travel_both_ways(open_session: Kernel) -> None:
    cell = open_session.run(
        """
        big = torch.arange(30_000_000, dtype=torch.float32)
        back = s.run(lambda t: t + 1, big)
        s.push(big=big)
        (back.shape, float(back[9] - big[9]), float(s.pull("big", rank=1)[12345]))
        """
    ).ok()
    assert cell.value == "(torch.Size([30000000]), 1.0, 12345.0)"


def test_bars_displays_and_figures_come_into_the_cell_that_calls(open_session: Kernel) -> None:
    pytest.importorskip("matplotlib")
    cell = open_session.run(
        """
        def show():
            from tqdm import tqdm
            from IPython.display import display, HTML
            for _ in tqdm(range(5)): pass
            if dist.get_rank() == 0:
                display(HTML("<b>here</b>"))
                import matplotlib.pyplot as plt
                plt.plot([1, 2])
        s.run(show)
        """
    ).ok()
    kinds = [kind for display in cell.displays for kind in display]
    assert "text/html" in kinds and "image/png" in kinds
    assert any("5/5" in display.get("text/plain", "") for display in cell.displays)


def test_unfinished_lines_belong_to_their_call(open_session: Kernel) -> None:
    kernel = open_session
    first = kernel.run("s.run(lambda: print('no newline', end='') if dist.get_rank() == 0 else None)").ok()
    second = kernel.run("s.run(lambda: print('next') if dist.get_rank() == 0 else None)").ok()
    assert first.lines == ["[0] no newline"]
    assert second.lines == ["[0] next"]


def test_output_between_calls_is_kept_and_shown_by_the_next(open_session: Kernel) -> None:
    kernel = open_session
    (kernel.folder / "over").unlink(missing_ok=True)
    kernel.run(
        """
        def later():
            import threading
            def speak():
                while not os.path.exists("over"): time.sleep(0.01)
                print("between\\n", end="")  # in one write
            if dist.get_rank() == 0: threading.Thread(target=speak).start()
        s.run(later)
        """
    ).ok()
    (kernel.folder / "over").touch()
    assert wait_until(lambda: "between" in kernel.run("s.lines(0)[-1:]").value, 60)
    cell = kernel.run("s.run(dist.get_rank)").ok()
    assert cell.lines == ["[0] between"]
    assert "between" in kernel.run("s.lines(0)[-1]").ok().value


def test_an_error_is_the_ranks_own_and_the_session_goes_on(open_session: Kernel) -> None:
    kernel = open_session
    cell = kernel.run(
        """
        def fail(limit):
            if dist.get_rank() == 1:
                raise ValueError(f"more than {limit}")
            return "fine"
        s.grace = 60.0  # the other one may return later
        s.run(fail, 3)
        """
    )
    kernel.run("s.grace = 1.0").ok()
    assert cell.error == ("ValueError", "more than 3")
    assert 'raise ValueError(f"more than {limit}")' in cell.traceback
    assert cell.traceback.count("ValueError: more than 3") == 1
    assert "rank 1" in cell.told and "made anew" not in cell.told
    assert kernel.run("s.run(dist.get_rank, returns='all')").ok().value == "[0, 1]"


UNEVEN = {
    "raises before it": "if dist.get_rank() == 0: raise KeyError('lost')\ndist.all_reduce(torch.ones(1))",
    "before a gather": "if dist.get_rank() == 0: raise KeyError('lost')\nAccelerator().gather(torch.ones(1))",
    "in a backward": """
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        if dist.get_rank() == 0: raise KeyError('lost')
        model(torch.ones(1, 2)).sum().backward()""",
    "caught by the other": """
        try:
            if dist.get_rank() == 0: raise KeyError('lost')
            dist.barrier()
        except RuntimeError:
            pass""",
}


@pytest.mark.once
@pytest.mark.parametrize("name", UNEVEN)
def test_ranks_that_wait_for_a_failed_one_come_back(open_session: Kernel, name: str) -> None:
    kernel = open_session
    body = UNEVEN[name].replace("\n        ", "\n").strip().replace("\n", "\n    ")
    cell = kernel.run(f"def uneven():\n    {body}\ns.run(uneven)")  # gloo itself waits for half an hour
    assert cell.error == ("KeyError", "'lost'"), cell.traceback
    assert "the process group was made anew" in cell.told
    again = kernel.run("s.run(lambda: Accelerator().gather(torch.tensor([dist.get_rank()])).tolist())").ok()
    assert again.value == "[0, 1]"


@pytest.mark.once
@pytest.mark.not_on("darwin", "ranks compare shapes by sockets of Linux")
def test_a_gather_of_different_shapes_is_an_error_and_variables_stay(open_session: Kernel) -> None:
    kernel = open_session
    kernel.run("s.push(kept=3)").ok()
    for _ in range(2):  # the second time in another group perhaps
        cell = kernel.run("s.run(lambda: Accelerator().gather(torch.zeros(1 + dist.get_rank())))")
        assert cell.error is not None and cell.error[0] == "RuntimeError", cell.traceback
        assert "of the same shape and dtype on every rank" in cell.error[1]
    assert kernel.run("s.pull('kept')").ok().value == "3"


@pytest.mark.once
def test_accelerators_go_on_with_the_new_group(open_session: Kernel) -> None:
    kernel = open_session
    kernel.run("def make():\n    global acc\n    acc = Accelerator()\ns.run(make)").ok()
    cell = kernel.run("def fail():\n    if dist.get_rank(): 1 / 0\n    dist.barrier()\ns.run(fail)")
    assert cell.error is not None and cell.error[0] == "ZeroDivisionError"
    assert kernel.run("s.run(lambda: acc.gather(torch.ones(1)).tolist())").ok().value == "[1.0, 1.0]"


@pytest.mark.once
def test_a_call_that_destroys_the_group_leaves_a_new_one(open_session: Kernel) -> None:
    kernel = open_session
    kernel.run("s.run(dist.destroy_process_group)").ok()
    assert kernel.run("s.run(dist.get_world_size)").ok().value == "2"


def test_exit_is_an_error_and_the_worker_stays(open_session: Kernel) -> None:
    cell = open_session.run("s.run(lambda: sys.exit(3))")
    assert cell.error is not None and cell.error[0] == "WorkerExitedError" and "exit(3)" in cell.error[1]
    assert open_session.run("s.run(dist.get_rank)").ok().value == "0"


WAITS = {
    "python": "time.sleep(3600)",
    "collective": "dist.barrier() if dist.get_rank() == 0 else time.sleep(3600)",
    "gather": "Accelerator().gather(torch.ones(1)) if dist.get_rank() == 0 else time.sleep(3600)",
    "different collectives": "dist.recv(torch.ones(1), 1) if dist.get_rank() == 0 else dist.barrier()",
}


@pytest.mark.parametrize("name", WAITS)
def test_an_interrupt_stops_the_call_not_the_session(open_session: Kernel, name: str) -> None:
    kernel = open_session
    pids = kernel.run("s.pids").ok().value

    def interrupt() -> None:
        time.sleep(0.3)
        kernel.interrupt()

    kernel.run(f"def wait():\n    if dist.get_rank() == 0: print('go')\n    {WAITS[name]}").ok()
    cell = kernel.run("s.run(wait)", during=interrupt)
    assert cell.error is not None and cell.error[0] == "KeyboardInterrupt"
    assert "the session goes on" in cell.error[1]
    assert (
        kernel.run("s.run(lambda: Accelerator().gather(torch.ones(1)).tolist())").ok().value == "[1.0, 1.0]"
    )
    assert kernel.run("s.pids").ok().value == pids


def test_a_rank_that_ends_by_itself_when_it_is_stopped_was_not_killed_by_the_session(kernel: Kernel) -> None:
    kernel.run(f"{IMPORTS}\nimport signal\ne = Session(2)").ok()
    cell = kernel.run(
        """
        def leave():
            try:
                open(f"here{dist.get_rank()}", "w").close()
                time.sleep(600)
            except KeyboardInterrupt:
                if dist.get_rank() == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise

        def stop():
            while not (os.path.exists("here0") and os.path.exists("here1")):
                time.sleep(0.01)
            e.stop()

        threading.Thread(target=stop).start()
        e.run(leave)
        """
    )
    assert cell.error is not None and cell.error[0] == "RunStoppedError", cell.traceback
    assert "and rank 0 with it" in cell.error[1]
    assert "SIGKILL" in cell.told and "did not come back" not in cell.told
    kernel.run("e.close()").ok()


STUCK = """
def be_stuck(name):
    import ctypes
    while True:
        try:
            open(name, "w").close()
            ctypes.PyDLL(None).sleep(100)  # holds the GIL
        except BaseException:  # the interrupt came before
            pass
"""


@pytest.mark.once
def test_a_worker_that_does_not_come_back_is_killed_and_restart_replaces_it(kernel: Kernel) -> None:
    kernel.run(f"{IMPORTS}\n{STUCK}\nh = Session(2)\nh.push(x=1)\ncall._RELEASE_SECONDS = 5.0").ok()
    kernel.run(
        """
        def hang():
            if dist.get_rank() == 1: be_stuck("hangs")
            while not os.path.exists("hangs"): time.sleep(0.01)
            raise ValueError("first")
        """
    ).ok()
    cell = kernel.run("h.run(hang)")
    assert cell.error == ("ValueError", "first"), cell.traceback
    assert "did not come back and was killed" in cell.told
    cell = kernel.run("h.run(dist.get_rank)")
    assert cell.error is not None and cell.error[0] == "SessionError"
    assert "rank 1" in cell.error[1] and "restart" in cell.error[1]
    assert "did not come back" in cell.error[1] and "memory" not in cell.error[1]
    assert "dead" in kernel.run("h").value and "did not come back" in kernel.run("h").value
    kernel.run("h.restart()").ok()
    assert kernel.run("h.run(dist.get_rank, returns='all')").ok().value == "[0, 1]"
    assert kernel.run("h.pull('x')").error is not None
    kernel.run("h.close()\ncall._RELEASE_SECONDS = 60.0").ok()


@pytest.mark.once
def test_an_interrupt_says_whether_the_session_goes_on(kernel: Kernel) -> None:
    kernel.run(f"{IMPORTS}\n{STUCK}\nd = Session(2)\ncall._RELEASE_SECONDS = 15.0").ok()
    kernel.run(
        """
        def hang():
            if dist.get_rank() == 1: be_stuck("stuck")
            while not os.path.exists("stuck"): time.sleep(0.01)
            print("go")
            time.sleep(100)
        """
    ).ok()
    cell = kernel.run("d.run(hang)", during=kernel.interrupt)
    assert cell.error is not None and cell.error[0] == "KeyboardInterrupt"
    assert cell.error[1].endswith(
        "stopped on all ranks, and rank 1 with it: session.restart() starts new workers"
    )
    kernel.run("d.restart(); d.close(); call._RELEASE_SECONDS = 60.0").ok()


@pytest.mark.once
def test_a_killed_worker_is_told_by_the_call_and_the_next(kernel: Kernel) -> None:
    kernel.run(f"{IMPORTS}\nk = Session(2)").ok()
    cell = kernel.run(
        """
        def die():
            if dist.get_rank() == 1: os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
        k.run(die)
        """
    )
    assert cell.error is not None and cell.error[0] == "WorkerKilledError" and "rank 1" in cell.error[1]
    kernel.run("k.restart()").ok()
    victim = int(kernel.run("k.pids[0]").value)
    os.kill(victim, signal.SIGKILL)
    assert wait_until(lambda: kernel.run("k.status").value == "'dead'", 60)
    cell = kernel.run("k.run(dist.get_rank)")
    assert cell.error is not None and cell.error[0] == "SessionError" and "SIGKILL" in cell.error[1]
    kernel.run("k.close()").ok()


def test_a_second_call_at_the_same_time_is_refused(open_session: Kernel) -> None:
    cell = open_session.run(
        """
        def wait_for_end():
            while not os.path.exists("refused"): time.sleep(0.01)
        if os.path.exists("refused"): os.remove("refused")
        slow = threading.Thread(target=s.run, args=(wait_for_end,))
        slow.start()
        while s.status != "busy": time.sleep(0.01)
        try:
            s.run(dist.get_rank)
        except SessionError as error:
            print(error)
        print(s.status)
        open("refused", "w").close()
        slow.join()
        s.run(dist.get_rank)
        """
    ).ok()
    assert "busy with wait_for_end" in cell.stdout and "busy" in cell.lines and cell.value == "0"


def test_stop_from_another_thread_lets_ranks_agree(open_session: Kernel) -> None:
    cell = open_session.run(
        """
        def train():
            accelerator = Accelerator()
            steps = 0
            while not accelerator.should_stop:
                dist.barrier()
                steps += 1
                time.sleep(0.01)
                if steps == 2: open(f"steps{dist.get_rank()}", "w").close()
            return steps
        def stop():
            while not all(map(os.path.exists, files)): time.sleep(0.01)
            s.stop()
        files = ["steps0", "steps1"]
        for file in filter(os.path.exists, files): os.remove(file)
        threading.Thread(target=stop).start()
        s.run(train, returns="all")
        """
    ).ok()
    first, second = eval(cell.value)
    assert first == second > 1
    assert open_session.run("s.run(lambda: Accelerator().should_stop)").ok().value == "False"


@pytest.mark.once
def test_a_wait_for_absent_ranks_is_told(kernel: Kernel) -> None:
    cell = kernel.run(
        f"""
        {IMPORTS}
        w = Session(2, hang_timeout=1)
        def late():
            if dist.get_rank() == 0:
                Accelerator().gather(torch.ones(1))
            else:
                while not os.path.exists("told"): time.sleep(0.1)
                Accelerator().gather(torch.ones(1))
        w.run(late)
        """,
        during=(kernel.folder / "told").touch,
        at="time.sleep(0.1)",
    ).ok()
    assert "rank 0 has entered all_gather, rank 1 has not" in cell.stderr
    assert re.search(
        r"rank 1 \(process \d+\):\n.*    (cell In\[\d+\]|a cell), line \d+: while not .*: time.sleep\(0.1\)",
        cell.stderr,
    )
    assert cell.stderr.count("time.sleep(0.1)") == 1  # where a rank answers late, that is told besides
    kernel.run("w.close()").ok()


def test_two_sessions_and_a_launch_at_once(kernel: Kernel) -> None:
    cell = kernel.run(
        f"""
        {IMPORTS}
        with Session(2) as a, Session(2) as b:
            print(a.run(dist.get_world_size), b.run(dist.get_rank, returns="all"))
            print(notebook_launcher(lambda: 5, num_processes=2))
            a.close()
            print(b.run(dist.get_world_size), a)
        """
    ).ok()
    assert "2 [0, 1]" in cell.stdout and "<Session of 2 processes: closed>" in cell.stdout


def test_a_session_that_nobody_holds_ends(kernel: Kernel) -> None:
    pids = set(ast.literal_eval(kernel.run(f"{IMPORTS}\nlost = Session(2); lost.pids").ok().value))
    assert pids <= {child.pid for child in kernel.children()}
    kernel.run("import gc; del lost; gc.collect()").ok()
    assert wait_until(lambda: pids.isdisjoint(child.pid for child in kernel.children()), 60)


def test_wrong_arguments_are_told(kernel: Kernel) -> None:
    kernel.run(IMPORTS).ok()
    for code, text in {
        "Session(0)": "num_processes=0",
        "Session(2, mixed_precision='half')": "mixed_precision",
        "Session(2, hang_timeout='x')": "hang_timeout='x'",
        "Session(2, hang_timeout=-1)": "hang_timeout=-1",
        "Session(2, hang_timeout=float('nan'))": "hang_timeout=nan",
        "Session(2, environment={'A': 1})": "environment={'A': 1}",
    }.items():
        cell = kernel.run(code)
        assert cell.error is not None and text in cell.error[1], code
    kernel.run("t = Session(1)").ok()
    for code, text in {
        "t.push(3)": "push takes values by name",
        "t.push({'for': 3})": "'for' cannot be the name",
        "t.push(x=1, ranks=None)": "ranks=None",
        "t.push(x=1, ranks=[[0]])": "ranks=[[0]]",
        "t.pull('x', rank=None)": "ranks=None",
        "t.execute(3)": "code=3",
        "t.stop('now')": "grace='now'",
        "t.run(3, x=1)": "function=3 is not callable",
        "t.run(lambda a: 1, b=2)": "the call would be",
    }.items():
        cell = kernel.run(code)
        assert cell.error is not None and text in cell.error[1], code
    assert kernel.run("t.calls").value == "0"  # none of it has reached a worker
    kernel.run("t.close()").ok()
    assert kernel.run("t = Session(1); t.run(lambda: 1, returns='some')").error is not None
    cell = kernel.run("t.run(lambda a: 1)")
    assert cell.error is not None and cell.error[0] == "TypeError"
    cell = kernel.run("t.run(lambda f: 1, threading.Lock())")
    assert cell.error is not None and cell.error[0] == "ShipError" and "args[0]" in cell.error[1]
    cell = kernel.run("t.run(lambda: threading.Lock())")
    assert cell.error is not None and cell.error[0] == "ShipError" and "returned value" in cell.error[1]
    assert kernel.run("t.run(lambda: 'still')").ok().value == "'still'"
    kernel.run("t.close()").ok()
    cell = kernel.run("t.run(os.getpid)")
    assert cell.error is not None and "closed" in cell.error[1]
