"""A worker is killed: until that is noticed, and until all ranks run again, beside torchrun and a promise."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.benchmarks.subprocesses import Contender
from tests.benchmarks.table import Row, compare, interleave

ROUNDS = 3
NOTICED_SECONDS = 1.0
AGAIN_SECONDS = 3.0
_LOOK_SECONDS = 0.002
_PATIENCE_SECONDS = 60.0


def run() -> list[Row]:
    with contextlib.ExitStack() as stack:
        makers = {
            "ours": "forked",
            "fork server": "fresh",
            "torchrun": "torchrun",
            "accelerate": "accelerate",
        }
        contenders: dict[str, Callable[[], float]] = {
            name: stack.enter_context(Contender(f"bench_restart:{maker}")) for name, maker in makers.items()
        }
        contenders["3 s"] = lambda: AGAIN_SECONDS
        seconds = interleave(contenders, rounds=ROUNDS)
        fresh = seconds.pop("fork server")
        rows = compare("all ranks run again after a kill, forked", seconds, {"3 s": 1.0, "torchrun": 1.0})
        rows += compare(
            "the same, from a fork server", {**seconds, "ours": fresh}, {"3 s": 1.0, "torchrun": 1.0}
        )
        noticed = {
            name: stack.enter_context(Contender(f"bench_restart:noticed_{name}"))
            for name in ("forked", "fresh")
        }
        contenders = {"ours": noticed["forked"], "fresh": noticed["fresh"], "1 s": lambda: NOTICED_SECONDS}
        seconds = interleave(contenders, rounds=ROUNDS)
        for what, name in (("forked", "ours"), ("from a fork server", "fresh")):
            times = {"ours": seconds[name], "1 s": seconds["1 s"]}
            rows += compare(f"a killed worker is noticed, {what}", times, {"1 s": 1.0})
    return rows


def work(folder: str) -> None:
    """Form a group, tell this attempt's processes, and wait; the second attempt returns."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    name = f"{attempt}_{dist.get_rank()}"
    note = Path(folder, f"{name}.tmp")
    note.write_text(json.dumps([os.getpid(), time.time()]))
    note.rename(note.with_suffix(".json"))
    if attempt == "0":
        dist.all_reduce(torch.ones(1)) if dist.get_rank() == 0 else time.sleep(_PATIENCE_SECONDS)
    dist.destroy_process_group()


def told(folder: str, attempt: int) -> list[list[float]]:
    """Wait until both ranks of an attempt have told their process and time."""
    paths = [Path(folder, f"{attempt}_{rank}.json") for rank in range(2)]
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not all(path.exists() for path in paths):
        if time.monotonic() > deadline:
            raise RuntimeError(f"attempt {attempt} has not started")
        time.sleep(_LOOK_SECONDS)
    return [json.loads(path.read_text()) for path in paths]


def kill(folder: str) -> float:
    """Kill rank 1 of the first attempt; return when."""
    pid = int(told(folder, 0)[1][0])
    killed = time.time()
    os.kill(pid, signal.SIGKILL)
    return killed


def forked() -> Callable[[], float]:
    return lambda: ours("fork")[1]


def fresh() -> Callable[[], float]:
    return lambda: ours("forkserver")[1]


def noticed_forked() -> Callable[[], float]:
    return lambda: ours("fork")[0]


def noticed_fresh() -> Callable[[], float]:
    return lambda: ours("forkserver")[0]


def ours(start_method: str) -> tuple[float, float]:
    """Return the seconds from the kill until the launcher knows, and until both ranks work again."""
    from notebook_accel import notebook_launcher
    from notebook_accel.events import Failure

    with tempfile.TemporaryDirectory() as folder:
        run = notebook_launcher(
            work,
            (folder,),
            num_processes=2,
            max_restarts=1,
            block=False,
            view="none",
            start_method=start_method,  # type: ignore[arg-type]
        )
        moments: list[float] = []
        apply = run.record.apply

        def noting(event: object) -> None:
            if isinstance(event, Failure):
                moments.append(time.time())
            apply(event)

        run.record.apply = noting
        killed = kill(folder)
        again = max(moment for _, moment in told(folder, 1))
        run.result()
        return moments[0] - killed, again - killed


def torchrun() -> Callable[[], float]:
    return lambda: command(
        "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"
    )


def accelerate() -> Callable[[], float]:
    return lambda: command(
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes=2",
        "--monitor_interval=0.1",
        "--main_process_port=0",
    )


def command(launcher: str, *flags: str) -> float:
    """Return the seconds from the kill until both ranks of a launcher's script work again."""
    with tempfile.TemporaryDirectory() as folder:
        script = [sys.executable, "-m", launcher, *flags]
        script += [
            "--max_restarts=1",
            "-m" if "torch" in launcher else "--module",
            "tests.benchmarks.bench_restart",
            folder,
        ]
        process = subprocess.Popen(script, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with ended(process):
            killed = kill(folder)
            return max(moment for _, moment in told(folder, 1)) - killed


@contextlib.contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
        process.wait(30)
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    work(sys.argv[1])
