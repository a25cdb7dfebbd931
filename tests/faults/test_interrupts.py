"""Interrupts at random moments of launches and sessions: each is obeyed, and the next launch finds nothing of it.

The seed is in the output of a failure. FAULTS_SEED gives it again, FAULTS_TIMES=10 tries ten times as many.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.scripts import SEED, TIMES, run

WORK = f"""
import random, psutil
chooser = random.Random({SEED})
print("seed {SEED}")

def work():
    import torch.distributed as dist
    dist.init_process_group("gloo")
    for _ in range(10):
        dist.barrier()
        time.sleep(0.01)
    return dist.get_rank()

def interrupt_later(seconds):
    # as a front end does, which interrupts the process group
    timer = threading.Timer(seconds, os.killpg, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer

def measure(call):
    began = time.monotonic()
    call()
    return time.monotonic() - began

def is_servant(process):
    return process.name() == "accel-agent" or "multiprocessing.resource_tracker" in " ".join(process.cmdline())

def workers():
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if not is_servant(process):
                found.append(process)
        except psutil.Error:
            pass
    return found
"""


@pytest.mark.parametrize(("method", "times"), [("fork", 12), ("fresh", 8)])
def test_launches(tmp_path: Path, method: str, times: int) -> None:
    code = f"""
options = dict(num_processes=2, start_method={method!r}, returns="all", view="none", output="none")
notebook_launcher(work, **options)  # what is started once, such as an agent
longest = 1.2 * min(measure(lambda: notebook_launcher(work, **options)) for _ in range(2))
interrupted = 0
for number in range({times * TIMES}):
    try:
        timer = interrupt_later(chooser.uniform(0, longest))
        try:
            assert notebook_launcher(work, **options) == [0, 1]
        finally:
            timer.join()
        time.sleep(0)
    except KeyboardInterrupt:
        interrupted += 1
    if options["start_method"] == "fresh":
        wait_until(lambda: not workers(), "those end that the agent was asked for in vain")
    else:
        assert not workers(), (number, workers())
    wait_until(lambda: threading.active_count() == 1, "the timer, which an interrupt may outrun, ends")
    assert all(run.is_over for run in na.runs())
    if number % 4 == 0:
        assert notebook_launcher(work, **options) == [0, 1]
print("interrupted", interrupted)
"""
    out = run(WORK + code, tmp_path)
    assert f"interrupted {times * TIMES}" in out


@pytest.mark.parametrize("method", ["fork", "fresh"])
def test_sessions(tmp_path: Path, method: str) -> None:
    """A call that is interrupted leaves its session; one that is interrupted while it opens leaves nothing."""
    code = f"""
def turn():
    import torch.distributed as dist
    for _ in range(10):
        dist.barrier()
        time.sleep(0.01)
    return dist.get_rank()

be_patient()
opening = min(measure(lambda: Session(2, start_method={method!r}).close()) for _ in range(2))
session = Session(2, start_method={method!r})
pids = session.run(os.getpid, returns="all")
for number in range({10 * TIMES}):
    try:
        timer = interrupt_later(chooser.uniform(0, 0.2))
        try:
            assert session.run(turn, returns="all") == [0, 1]
        finally:
            timer.join()
        time.sleep(0)
    except KeyboardInterrupt:
        pass
    assert session.run(turn, returns="all") == [0, 1]
assert session.run(os.getpid, returns="all") == pids
session.close()
for number in range({4 * TIMES}):
    opened = None
    try:
        timer = interrupt_later(chooser.uniform(0, opening))
        try:
            opened = Session(2, start_method={method!r})
        finally:
            timer.join()
        time.sleep(0)
    except KeyboardInterrupt:
        pass
    if opened is not None:
        opened.close()
    if {method!r} == "fresh":
        wait_until(lambda: not workers(), "those end that the agent was asked for in vain")
    else:
        assert not workers(), (number, workers())
print("all came back")
"""
    assert "all came back" in run(WORK + code, tmp_path)


def test_a_session_whose_ranks_an_interrupt_reaches_first(tmp_path: Path) -> None:
    """A terminal interrupts the ranks too: that one has ended is no reason of its own."""
    out = run(
        """
from notebook_accel.session.workers import Workers
start = Workers.start
def start_and_lose(self):
    start(self)
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(self.pids[0], signal.SIGKILL)
    wait_until(lambda: self.dead, "the end of a rank")
Workers.start = start_and_lose
try:
    Session(2, start_method="fork")
except KeyboardInterrupt as error:
    print("interrupted:", error)
""",
        tmp_path,
    )
    assert "interrupted: the session is closed: its start was interrupted" in out, out


CALLBACKS = """
called = []
def fail():
    called.append("fail")
    sys.exit("a callback's own")
def note():
    called.append(na.runs()[-1].status)

def add_callbacks(*callbacks):
    def add():
        wait_until(na.runs, "the run")
        for callback in callbacks:
            na.runs()[-1].when_ended(callback)
        open("go", "w").close()
    threading.Thread(target=add).start()

def work():
    wait_until(lambda: os.path.exists("go"), "callbacks")
    return 7
"""


def test_a_callback_that_never_ends_can_be_interrupted(tmp_path: Path) -> None:
    out = run(
        CALLBACKS
        + """
def hang():
    called.append("hang")
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait()
add_callbacks(hang, note)
try:
    notebook_launcher(work, num_processes=2, start_method="fork", view="none")
except KeyboardInterrupt:
    print("interrupted", called, na.runs()[-1].result())

# an interrupt that was not obeyed before the end keeps no callback from being called
from notebook_accel.launch import run
close_sink = run.close_sink
def close(sink):
    os.kill(os.getpid(), signal.SIGINT)
    close_sink(sink)
run.close_sink = close
called.clear()
os.remove("go")
na.runtime.runs().clear()
add_callbacks(note, note)
try:
    notebook_launcher(work, num_processes=2, start_method="fork", log_dir="logs")
except KeyboardInterrupt:
    print("twice", called)

# nor one that comes while a message about another is shown
run.close_sink = close_sink
class Nameless:
    def __call__(self):
        raise ValueError("odd")
    def __repr__(self):
        os.kill(os.getpid(), signal.SIGINT)
        return "a run"
called.clear()
os.remove("go")
na.runtime.runs().clear()
run.Run.__repr__ = Nameless.__repr__
add_callbacks(Nameless(), note)
try:
    notebook_launcher(work, num_processes=2, start_method="fork", view="none")
except KeyboardInterrupt:
    print("then", called)
""",
        tmp_path,
    )
    assert "interrupted ['hang', 'done'] 7" in out and "twice ['done', 'done']" in out, out
    assert "then ['done']" in out, out


def test_a_callback_that_raises_leaves_the_value_and_other_callbacks(tmp_path: Path) -> None:
    out = run(
        CALLBACKS
        + """
add_callbacks(fail, note)
value = notebook_launcher(work, num_processes=2, start_method="fork", view="none")
print(f"value {value} {called}\\n", end="")  # a notice in another thread may come before or after it
os.remove("go")
called.clear()
def start():
    run = notebook_launcher(work, num_processes=2, start_method="fresh", view="none", block=False)
    run.when_ended(fail)
    run.when_ended(note)
    open("go", "w").close()
    return run
run = start()
print(f"value {run.result()} {run.status}\\n", end="")
wait_until(lambda: called == ["fail", "done"], called)
""",
        tmp_path,
    )
    assert "value 7 ['fail', 'done']" in out and "value 7 done" in out, out
    assert out.count("a callback's own") == 2, out
