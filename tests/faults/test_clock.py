"""A clock that jumps by days while launches run: waits, hangs, causes and values do not depend on it."""

from __future__ import annotations

from pathlib import Path

from tests.faults.scripts import run
from tests.structure.source import modules

CLOCK = """
import functools, itertools
true_time, true_ns = time.time, time.time_ns
jumps = itertools.cycle([0.0, -90_000.0, 400_000.0, -7.5, 3e6, -3e8])

# in the kernel and, by the fork, in its workers: each look finds another day
time.time = lambda: true_time() + next(jumps)
time.time_ns = lambda: int(time.time() * 1e9)
"""


def test_launches(tmp_path: Path) -> None:
    out = run(
        CLOCK
        + """
def train():
    import torch
    from notebook_accel import Accelerator
    accelerator = Accelerator()
    model, optimizer = torch.nn.Linear(2, 2), None
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(5):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        na.print_metrics({"loss": float(step)}, step=step)
        print("step", step)
    return accelerator.process_index

be_patient()
began = time.monotonic()
run = notebook_launcher(train, num_processes=2, returns="all", view="none", output="none",
                        block=False, hang_timeout=20)
print("value", run.result(90), 0 <= run.seconds <= time.monotonic() - began, "Run train" in repr(run), len(run.lines()))
print(run.metrics is not None)

def wait():
    accelerator = na.Accelerator()
    open(f"waits{accelerator.process_index}", "w").close()
    while not accelerator.should_stop:
        time.sleep(0.01)
    return "asked"

run = notebook_launcher(wait, num_processes=2, view="none", block=False)
assert not run.wait(0.05)
wait_until(lambda: os.path.exists("waits0") and os.path.exists("waits1"), "the ranks wait")
run.stop()
print("stopped", run.result(100))
""",
        tmp_path,
    )
    assert "value [0, 1] True True 15" in out and "stopped asked" in out, out


def test_the_cause_of_a_failure(tmp_path: Path) -> None:
    """The rank that failed first is named, whatever the clock says; the others follow from it."""
    out = run(
        CLOCK
        + """
def fail(number):
    import torch.distributed as dist
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == number % 2:
        if number < 4:
            raise ValueError("the cause")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()

for number in range(6):
    try:
        notebook_launcher(fail, (number,), num_processes=2, start_method="fork", view="none", output="none")
    except (ValueError, na.WorkerKilledError) as error:
        first = error.__notes__[0] if hasattr(error, "__notes__") and number < 4 else str(error)
        print("right" if f"rank {number % 2} " in first else first)

def leave():
    os.write(2, b"last words\\n")
    os._exit(3)

class Unpickled:
    def __reduce__(self): return leave, ()

try:
    notebook_launcher(print, (Unpickled(),), num_processes=2, start_method="fresh", view="none", output="none")
except na.WorkerExitedError as error:
    print("heard" if "last words" in str(error) else error)
""",
        tmp_path,
    )
    assert out.count("right") == 6 and "heard" in out, out


def test_the_seconds_of_a_failure(tmp_path: Path) -> None:
    """Those of a launch and of a session's call are the true ones."""
    out = run(
        CLOCK
        + """
def fail():
    raise ValueError("at once")

def read_seconds(call):
    began = time.monotonic()
    try:
        call()
    except ValueError as error:
        note = next(note for note in error.__notes__ if "raised this after" in note)
        said = float(note.split("raised this after ")[1].split()[0])
        return 0 <= said <= time.monotonic() - began + 0.05  # it is rounded

launch = functools.partial(notebook_launcher, fail, num_processes=2, start_method="fork", view="none", output="none")
print("launches", [read_seconds(launch) for _ in range(3)])
with Session(2, start_method="fork", output="none") as session:
    print("calls", [read_seconds(lambda: session.run(fail)) for _ in range(6)])
""",
        tmp_path,
    )
    assert f"launches {[True] * 3}" in out and f"calls {[True] * 6}" in out, out


def test_hangs_are_noticed_neither_early_nor_never(tmp_path: Path) -> None:
    out = run(
        CLOCK
        + """
be_patient()
def talk():  # until there is nothing any more but the hang
    while not os.path.exists("hangs"):
        print("it begins")
        time.sleep(0.1)

def hang():
    import torch.distributed as dist
    threading.Thread(target=talk).start()
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        open("hangs", "w").close()
        dist.barrier()
    time.sleep(300)

began = time.monotonic()
try:
    notebook_launcher(hang, num_processes=2, start_method="fork", view="none", hang_timeout=2, on_hang="raise")
except na.HangError as error:
    print("hang", time.monotonic() - began >= 2, "barrier" in str(error))
with Session(2, start_method="fork") as session:
    def turn():
        import torch.distributed as dist
        dist.barrier()
        return dist.get_rank()
    print("session", session.run(turn, returns="all"))
    def sleep():
        open(f"sleeps{os.environ['RANK']}", "w").close()
        time.sleep(300)
    def interrupt():
        wait_until(lambda: os.path.exists("sleeps0") and os.path.exists("sleeps1"), "the ranks sleep")
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt).start()
    try:
        session.run(sleep)
    except KeyboardInterrupt:
        print("interrupted", session.run(turn, returns="all"))
""",
        tmp_path,
    )
    assert "hang True True" in out and "session [0, 1]" in out and "interrupted [0, 1]" in out, out


def test_files_of_the_future(tmp_path: Path) -> None:
    """Checkpoints have numbers, and the newest is the one with the largest, whatever the times of files are."""
    out = run(
        CLOCK
        + """
import torch
from notebook_accel import Accelerator
from notebook_accel.utils import ProjectConfiguration
config = ProjectConfiguration("project", automatic_checkpoint_naming=True, total_limit=3)
accelerator = Accelerator(project_config=config)
model = accelerator.prepare(torch.nn.Linear(2, 2))
for number in range(5):
    accelerator.step = number
    folder = accelerator.save_state()
    for name in (folder, *(os.path.join(folder, name) for name in os.listdir(folder))):
        os.utime(name, (4e9 - 1e8 * number,) * 2)  # the newer, the older
print(sorted(os.listdir("project/checkpoints")))
accelerator.step = -1
accelerator.load_state()
print("step", accelerator.step)
""",
        tmp_path,
    )
    assert "['checkpoint_2', 'checkpoint_3', 'checkpoint_4']" in out and "step 4" in out, out


def test_no_time_of_a_file_decides() -> None:
    """Those that ask look whether a file was written again, which any other time says.

    Besides: what saves of other machines left is removed a day after the last write, and of several the newest counts;
    a run of another machine that outlives its notebook lives while it writes, where its lock is not seen here.
    """
    asking = [module.name for module in modules() if "st_mtime" in module.text or "getmtime" in module.text]
    assert asking == [
        "notebook_accel.big_modeling.mapped",
        "notebook_accel.checkpointing.folder",
        "notebook_accel.checkpointing.shards",
        "notebook_accel.launch.agent.modules",
        "notebook_accel.launch.engines.detached.folder",
    ]
