"""Kills: of the kernel in any phase, of ranks while they save, and of one kernel beside another."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.faults.scripts import SECONDS, SEED, TIMES, is_alive, run, start, wait_until
from tests.stopping import stop

KERNELS = f"""
import ctypes, psutil, random
chooser = random.Random({SEED})
print("seed {SEED}")
PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what outlives its kernel becomes this program's

def work():
    subprocess.Popen(["sh", "-c", "sleep 300 & sleep 300 & wait"])
    subprocess.Popen(["sleep", "300"])
    import torch.distributed as dist
    dist.init_process_group("gloo")
    for _ in range(10):
        dist.barrier()
        time.sleep(0.01)

def be_a_kernel(options):
    os.setsid()
    notebook_launcher(work, num_processes=2, view="none", output="none", **options)

def has_ended():
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False

def kill_one(seconds, **options):
    pid = os.fork()
    if pid == 0:
        try:
            be_a_kernel(options)
        finally:
            os._exit(0)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    began = time.monotonic()
    while not has_ended():
        left = psutil.Process().children(recursive=True)
        assert time.monotonic() - began < 90, [(child.name(), child.status(), child.cmdline()) for child in left]
        time.sleep(0.01)
"""


@pytest.mark.parametrize(("method", "times"), [("fork", 12), ("fresh", 2)])
def test_kernels_in_any_phase(tmp_path: Path, method: str, times: int) -> None:
    """All that ranks have started ends too, also where a rank has just returned."""
    code = f"""
options = dict(start_method={method!r})
def measure():
    began = time.monotonic()
    kill_one(None, **options)
    return time.monotonic() - began
longest = 1.2 * min(measure(), measure())
for number in range({times * TIMES}):
    kill_one(chooser.uniform(0, longest), **options)
print("all ended")
"""
    assert "all ended" in run(KERNELS + code, tmp_path)


def test_ranks_while_they_save(tmp_path: Path) -> None:
    """Of two ranks that save again and again one is killed: what the next launch loads is whole, and not older."""
    out = run(
        f"""
        import itertools, random, torch
        from notebook_accel import Accelerator
        chooser = random.Random({SEED})
        print("seed {SEED}")

        def train(at_least):
            accelerator = Accelerator()
            model = torch.nn.Linear(64, 64)
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
            parameters = list(model.parameters())
            def fill(number):
                with torch.no_grad():
                    for parameter in parameters:
                        parameter.fill_(number)
                        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, number)
                accelerator.step = number
            if os.path.exists("kept"):
                fill(-1)
                accelerator.load_state("kept")
                found = {{float(value) for each in parameters for value in each.detach().flatten()}}
                found |= {{float(optimizer.state[each]["momentum_buffer"].flatten()[0]) for each in parameters}}
                assert found == {{float(accelerator.step)}}, f"a mixture: {{found}} and {{accelerator.step}}"
                assert accelerator.step >= at_least, (accelerator.step, at_least)
            first = accelerator.step
            accelerator.wait_for_everyone()
            for number in itertools.count(first + 1):  # until it is killed
                fill(number)
                accelerator.save_state("kept", async_save=number % 2 == 0)
                if accelerator.is_main_process:
                    with open(f"loaded-{{first}}", "w") as file:
                        file.write(str(number - 1))  # one save behind the next is on the disk

        def find_pids(run):
            phases = list(run.record.phases.items())
            return {{rank: phase.pid for rank, phase in phases if phase.name == "running"}}

        be_patient()
        saved = 0
        killed = 0
        for number in range({4 * TIMES}):
            for left in [name for name in os.listdir(".") if name.startswith("loaded-")]:
                saved = max(saved, int(open(left).read() or 0) - 1)
                os.unlink(left)
            run = notebook_launcher(train, (saved,), num_processes=2, view="none", output="none", block=False)
            loaded = lambda: [name for name in os.listdir(".") if name.startswith("loaded-")]
            wait_until(lambda: run.is_over or (loaded() and len(find_pids(run)) == 2), "the ranks save")
            time.sleep(chooser.uniform(0, 0.3))
            os.kill(find_pids(run)[number % 2], signal.SIGKILL)
            try:
                run.result(60)
            except na.WorkerKilledError as error:
                killed += error.rank == number % 2
        print("killed", killed, "saved", saved)
        """,
        tmp_path,
    )
    assert f"killed {4 * TIMES}" in out, out


def test_one_of_two_kernels(tmp_path: Path) -> None:
    """Each has a session, and what one has is not the other's: neither its end nor its interrupt is."""
    code = """
        def busy():
            open(f"busy-{os.getppid()}-{os.environ['RANK']}", "w").close()
            while not os.path.exists("go"):
                time.sleep(0.01)
            return int(os.environ["RANK"])
        be_patient()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with Session(2, start_method="fork") as session:
            pids = session.run(os.getpid, returns="all")
            with open("part", "w") as file:
                file.write(" ".join(map(str, pids)))
            os.rename("part", "pids")
            try:
                print(session.run(busy, returns="all"))
            except KeyboardInterrupt:
                print("interrupted")
            print(session.run(lambda: int(os.environ["RANK"]), returns="all"), flush=True)
            print(notebook_launcher(lambda: int(os.environ["RANK"]), num_processes=2, returns="all", view="none"))
    """
    folders = [tmp_path / name for name in "abc"]
    programs = []
    try:
        for folder in folders:
            folder.mkdir()
            programs.append(start(code, folder))
        workers = []
        for program, folder in zip(programs, folders, strict=True):
            wait_until(lambda folder=folder: (folder / "pids").exists())  # type: ignore[misc]
            workers.append([int(pid) for pid in (folder / "pids").read_text().split()])
            busy = [folder / f"busy-{program.pid}-{rank}" for rank in (0, 1)]
            wait_until(lambda busy=busy: all(path.exists() for path in busy))  # type: ignore[misc]
        os.kill(programs[0].pid, signal.SIGKILL)
        os.killpg(programs[1].pid, signal.SIGINT)
        wait_until(lambda: not any(map(is_alive, workers[0])))
        out, _ = programs[1].communicate(timeout=240)
        assert "interrupted" in out and out.count("[0, 1]") == 2, out
        assert all(map(is_alive, workers[2])), "of another kernel"
        (folders[2] / "go").touch()
        out, _ = programs[2].communicate(timeout=240)
        assert out.count("[0, 1]") == 3, out
    finally:
        for program in programs:
            if program.poll() is None:
                os.killpg(program.pid, signal.SIGKILL)
            program.communicate()


def test_the_cause_while_the_kernel_stood_still(tmp_path: Path) -> None:
    """What the ranks say and how they end reaches a stopped kernel all at once, when it goes on."""
    kernel = start(
        """
        def wait():
            import torch.distributed as dist
            dist.init_process_group("gloo")
            rank = dist.get_rank()
            dist.barrier()
            open(f"pid{rank}", "w").write(str(os.getpid()))
            if rank == 1:
                time.sleep(300)
            try:
                dist.barrier()
            finally:
                os.rename(f"pid{rank}", f"lost{rank}")
        try:
            notebook_launcher(wait, num_processes=3, start_method="fork", view="none")
        except BaseException as error:
            print("raised", type(error).__name__, error)
        """,
        tmp_path,
    )
    wait_until(lambda: all((tmp_path / f"pid{rank}").exists() for rank in range(3)))
    wait_until(lambda: (tmp_path / "pid1").read_text() != "")
    stop(kernel.pid)
    os.kill(int((tmp_path / "pid1").read_text()), signal.SIGKILL)
    wait_until(lambda: all((tmp_path / f"lost{rank}").exists() for rank in (0, 2)))
    lost = time.monotonic()
    wait_until(lambda: time.monotonic() > lost + 1.5)  # the later, the less its own clock tells of the order
    os.kill(kernel.pid, signal.SIGCONT)
    output, _ = kernel.communicate(timeout=SECONDS)
    assert "raised WorkerKilledError rank 1 " in output, output


def test_an_agent_that_was_killed_is_replaced(tmp_path: Path) -> None:
    out = run(
        """
        def tell():
            return int(os.environ["RANK"])

        def kill():
            pid = na.runtime.agents()[0].pid
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

        session = Session(2, start_method="fresh")
        kill()
        session.restart()
        print(session.run(tell, returns="all"))
        session.close()
        kill()
        print(notebook_launcher(tell, num_processes=2, start_method="fresh", returns="all", view="none"))
        """,
        tmp_path,
    )
    assert out.splitlines() == ["[0, 1]"] * 2, out
