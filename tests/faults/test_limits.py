"""Limits of the system: memory, processes, descriptors, shared memory; and more ranks than cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.places import control_group, small_disk
from tests.faults.scripts import run


def test_a_rank_that_the_system_kills_for_its_memory(tmp_path: Path) -> None:
    code = """
        import psutil
        from notebook_accel import Accelerator

        def train():
            accelerator = Accelerator()
            accelerator.wait_for_everyone()
            held = []
            while accelerator.process_index == 1:
                held.append(b"x" * (32 << 20))
            accelerator.wait_for_everyone()

        def left():
            return [child.name() for child in psutil.Process().children()]

        def value(): return int(os.environ["RANK"])

        be_patient()
        for method in ("fork", "fresh"):
            before = left()
            try:
                notebook_launcher(train, num_processes=2, start_method=method, view="none")
            except na.WorkerKilledError as error:
                print(method, error.rank, error)
            print("left", left() if method == "fork" else len(left()) - len(before) <= 2)
        print(notebook_launcher(value, num_processes=2, returns="all", view="none"))
        try:
            with Session(2, start_method="fork") as session:
                session.run(train)
        except na.NotebookAccelError as error:
            print("session", type(error).__name__, error)
    """
    with control_group("memory", {"memory.max": 1500 << 20}) as inside:
        out = run(code, tmp_path, prefix=inside)
    lines = out.splitlines()
    for method in ("fork 1", "fresh 1"):
        (text,) = [line for line in lines if line.startswith(method)]
        assert "was ended by SIGKILL" in text and "1.46 GiB" in text and "less memory" in text
    assert "left []" in lines and "left True" in lines and "[0, 1]" in lines
    (text,) = [line for line in lines if line.startswith("session")]
    assert "rank 1" in text and "1.46 GiB" in text


def test_a_script_that_the_system_kills_for_its_memory(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, time\n"
        "held = []\n"
        "while os.environ['RANK'] == '1':\n"
        "    held.append(b'x' * (32 << 20))\n"
        "time.sleep(300)\n"
    )
    code = """
        from notebook_accel.cli.main import main
        try:
            main(["launch", "--cpu", "--num_processes", "2", "train.py"])
        except SystemExit as stop:
            print("exit", stop.code)
    """
    with control_group("memory", {"memory.max": 1500 << 20}) as inside:
        out = run(code, tmp_path, prefix=inside)
    assert "rank 1 (local rank 1, process" in out and "1.46 GiB" in out, out
    assert out.splitlines()[-1] == "exit 137"


def test_somebody_else_kills_a_rank(tmp_path: Path) -> None:
    """The system has ended nothing for its memory: then that is not given as the cause."""
    with control_group("memory", {}) as inside:
        out = run(
            """
            def die():
                if os.environ["RANK"] == "1":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(300)
            try:
                notebook_launcher(die, num_processes=2, view="none")
            except na.WorkerKilledError as error:
                print(error)
            """,
            tmp_path,
            prefix=inside,
        )
    assert "SIGKILL: not by the system's out-of-memory killer" in out, out


@pytest.mark.parametrize("method", ["fork", "fresh"])
def test_no_further_process_can_start(tmp_path: Path, method: str) -> None:
    """The limit counts threads too: it is set where the program stands."""
    with control_group("pids", {"pids.max": 2000}) as inside:
        out = run(
            f"""
            def value(): return int(os.environ["RANK"])
            options = dict(start_method={method!r}, returns="all", view="none")
            for _ in range(2):  # an agent may have a template from the second launch on
                print(notebook_launcher(value, num_processes=2, **options))
            group = {inside[-1]!r}
            used = int(open(group + "/pids.current").read())
            with open(group + "/pids.max", "w") as file:
                file.write(str(used + 2))
            try:
                notebook_launcher(value, num_processes=6, **options)
            except Exception as error:
                print("refused:", type(error).__name__, error)
            with open(group + "/pids.max", "w") as file:
                file.write("max")
            wait_until(lambda: int(open(group + "/pids.current").read()) <= used, "all processes end")
            print(notebook_launcher(value, num_processes=2, **options))
            """,
            tmp_path,
            prefix=inside,
        )
    lines = out.splitlines()
    assert [line for line in lines if line == "[0, 1]"] == ["[0, 1]"] * 3, out
    (refused,) = [line for line in lines if line.startswith("refused:")]
    assert "LaunchError" in refused, out


@pytest.mark.parametrize("method", ["fork", "fresh"])
def test_too_few_descriptors(tmp_path: Path, method: str) -> None:
    out = run(
        f"""
        import itertools, resource
        def value(): return int(os.environ["RANK"])
        options = dict(start_method={method!r}, returns="all", view="none")
        print(notebook_launcher(value, num_processes=2, **options))
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = len(os.listdir("/proc/self/fd"))
        starts = [
            lambda: notebook_launcher(value, num_processes=6, **options),
            lambda: Session(6, start_method={method!r}),
        ]
        def start_with(free):
            resource.setrlimit(resource.RLIMIT_NOFILE, (used - 1 + free, before[1]))
            try:
                return notebook_launcher(value, num_processes=20, **options) == list(range(20))
            except na.LaunchError as error:
                print("too few:", "workers take" in str(error), error)
                return False
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, before)
        least = next(free for free in itertools.count(100, 4) if start_with(free))
        print("least", least < 250)
        for free in (1, 4, 5, 6, 8, 9, 20):
            resource.setrlimit(resource.RLIMIT_NOFILE, (used - 1 + free, before[1]))
            for start in starts:
                try:
                    start()
                except Exception as error:
                    print("refused:", type(error).__name__, error)
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        print("left", len(os.listdir("/proc/self/fd")) - used)
        print(notebook_launcher(value, num_processes=2, **options))
        """,
        tmp_path,
    )
    lines = out.splitlines()
    assert [line for line in lines if line == "[0, 1]"] == ["[0, 1]"] * 2, out
    refused = [line for line in lines if line.startswith("refused:")]
    assert len(refused) == 14 and all("LaunchError 6 workers take" in line for line in refused), out
    assert "left 0" in lines and "least True" in lines, out
    assert not [line for line in lines if line.startswith("too few: False")], "in the middle of a start"


def test_many_ranks_on_few_cores(tmp_path: Path) -> None:
    out = run(
        """
        import torch
        from notebook_accel import Accelerator
        def add():
            accelerator = Accelerator()
            total = accelerator.reduce(torch.tensor([float(accelerator.process_index)]), "sum")
            print("line of", accelerator.process_index)
            return total.item()
        lines = notebook_launcher(add, num_processes=32, start_method="fork", returns="all")
        print("sums", set(lines), len(lines))
        """,
        tmp_path,
    )
    assert "sums {496.0} 32" in out, out[-2000:]
    assert len({line for line in out.splitlines() if "line of" in line}) == 32


def test_no_shared_memory(tmp_path: Path) -> None:
    """What is launched needs no shared memory of a name; what a data loader lacks is said."""
    out = run(
        """
        import torch
        torch.set_num_threads(1)
        big = torch.ones(1 << 20)
        def total(): return big.sum().item()
        class Samples(torch.utils.data.Dataset):
            def __len__(self): return 4
            def __getitem__(self, index): return torch.ones(1 << 20)
        samples = Samples()
        def load(): return len(list(torch.utils.data.DataLoader(samples, num_workers=1)))
        for method in ("fork", "fresh"):
            print(method, notebook_launcher(total, num_processes=2, start_method=method, returns="all", view="none"))
            try:
                notebook_launcher(load, num_processes=2, start_method=method, view="none")
            except Exception as error:
                print("said:", type(error).__name__, str(error).replace(chr(10), " "))
        with Session(2) as session:
            print("session", session.run(total, returns="all"))
        """,
        tmp_path,
        prefix=small_disk("/dev/shm", "size=64k"),
    )
    for method in ("fork", "fresh", "session"):
        assert f"{method} [1048576.0, 1048576.0]" in out, out
    said = [line for line in out.splitlines() if line.startswith("said:")]
    assert len(said) == 2, out
    assert all("No space left on device" in line for line in said), said


def test_no_further_thread_can_start(tmp_path: Path) -> None:
    """The run is over, and its devices are free for the next one."""
    out = run(
        """
start = threading.Thread.start
def refuse(thread):
    if thread.name.startswith("notebook_accel get"):
        raise RuntimeError("can't start new thread")
    start(thread)
threading.Thread.start = refuse
try:
    notebook_launcher(os.getpid, num_processes=2, block=False)
except na.errors.LaunchError as error:
    print(error)
threading.Thread.start = start
print([run.is_over for run in na.runs()])
print(notebook_launcher(lambda: 5, num_processes=2, start_method="fork"))
""",
        tmp_path,
    )
    lines = out.splitlines()
    assert "can't start new thread; if the system gives no more, raise its limit (ulimit -u)" in lines
    assert "[True]" in lines and lines[-1] == "5", out
