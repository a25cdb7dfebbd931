"""Interrupts at each line of what starts and ends a run or a call, not only where a random moment meets."""

from __future__ import annotations

from pathlib import Path

from tests.faults.scripts import run

AIM = """
def list_lines(function):
    return sorted({line for _, _, line in function.__code__.co_lines() if line} - {function.__code__.co_firstlineno})

def interrupt_at(function, line):
    code = function.__code__
    def look(frame, event, argument):
        if frame.f_code is code and event == "line" and frame.f_lineno == line:
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
        return look if frame.f_code is code else None
    sys.settrace(look)

def try_each_line(functions, work, check):
    met = 0
    for function in functions:
        for line in list_lines(function):
            interrupt_at(function, line)
            try:
                work()
            except KeyboardInterrupt:
                met += 1
            sys.settrace(None)
            check(f"{function.__qualname__}:{line}")
    return met
"""


def test_a_session_is_never_left_busy(tmp_path: Path) -> None:
    out = run(
        AIM
        + """
from notebook_accel.session.core import Session as Core
from notebook_accel.session.workers import Workers
be_patient()
with Session(2, start_method="fork") as session:
    def work():
        session.run(os.getpid)
    def check(where):
        assert session.status == "idle", (where, session)
        assert session.run(lambda: 5) == 5, where
    print(try_each_line([Workers.begin, Workers.show, Workers.finish, Workers._end, Core._call], work, check) > 20)
""",
        tmp_path,
    )
    assert out.splitlines()[-1] == "True", out


def test_a_session_that_is_interrupted_at_its_start_leaves_no_worker(tmp_path: Path) -> None:
    out = run(
        AIM
        + """
import psutil
from notebook_accel.launch import registry
from notebook_accel.session.core import Session as Core
be_patient()
kept = []
def work():
    try:
        Session(1, start_method="fork").close()
    except KeyboardInterrupt as error:
        kept.append(error)  # as IPython keeps the last one, with its frames
        raise
def check(where):
    assert not registry.sessions(), where
    assert not psutil.Process().children(), where
print(try_each_line([Core._start, registry.add_session], work, check) > 5)
""",
        tmp_path,
    )
    assert out.splitlines()[-1] == "True", out


def test_a_session_that_is_interrupted_as_it_starts_anew_is_closed_and_says_so(tmp_path: Path) -> None:
    out = run(
        AIM
        + """
from notebook_accel.session.core import Session as Core
be_patient()
said, sessions = set(), []
def work():
    sessions.append(session := Session(1, start_method="fork"))
    interrupt_at(Core._call, line)
    session.restart()
met = 0
for line in list_lines(Core._call):
    try:
        work()
    except KeyboardInterrupt as error:
        met += 1
        if str(error):
            assert sessions[-1].status == "closed", line
            said.add(str(error))
        else:  # it came when the session had started anew
            assert sessions[-1].run(lambda: 5) == 5, line
    sys.settrace(None)
    sessions.pop().close()
print(met > 5, said)
""",
        tmp_path,
    )
    assert out.splitlines()[-1] == "True {'the session is closed: its start was interrupted'}", out


def test_a_run_that_is_interrupted_is_over(tmp_path: Path) -> None:
    out = run(
        AIM
        + """
import psutil
from notebook_accel.launch import registry, run
from notebook_accel.launch.engines import attempts
from notebook_accel.launch.supervise.local_group import LocalWorkerGroup
def check(where):
    assert all(run.is_over for run in na.runs()), (where, na.runs())
    assert not psutil.Process().children(), where
def launch():
    notebook_launcher(os.getpid, num_processes=2, start_method="fork", view="none")
def call():
    notebook_launcher(int, num_processes=1, view="none")
both = [registry.open_run, registry._add, run.Run.call, run.Run.execute, run.Run._close]
print(try_each_line([*both, attempts.run_attempt, LocalWorkerGroup.close], launch, check) > 20)
print(try_each_line(both, call, check) > 10)
""",
        tmp_path,
    )
    assert out.splitlines()[-2:] == ["True", "True"], out


def test_the_end_of_a_run_is_whole_also_where_patience_is_lost(tmp_path: Path) -> None:
    """An interrupt that came while workers were being ended has waited long by then."""
    out = run(
        AIM
        + """
from notebook_accel import interrupts
from notebook_accel.launch import run
interrupts.PATIENCE = 0.0
closed, close = [], run.close_sink
def note(sink):
    close(sink)
    closed.append(sink)
run.close_sink = note
def launch():
    notebook_launcher(os.getpid, num_processes=2, start_method="fork", log_dir="logs")
def check(where):
    assert na.runs()[-1].is_over, where
    assert len(closed) == 2, (where, closed)
    closed.clear()
print(try_each_line([run.Run._close], launch, check) > 5)
""",
        tmp_path,
    )
    assert out.splitlines()[-1] == "True", out
