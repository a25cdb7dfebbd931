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
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from tests.benchmarks.subprocesses import Contender
from tests.benchmarks.table import Row, compare, interleave

ROUNDS = 3
NOTICED_SECONDS = 1.0
AGAIN_SECONDS = 3.0
_LOOK_SECONDS = 0.002
_PATIENCE_SECONDS = 12.0


def run() -> list[Row]:
    """Return rows for both ways to start; on GPUs `accelerate launch` is torchrun, on CPUs it starts one process."""
    with contextlib.ExitStack() as stack:
        names = ("forked", "fresh", "torchrun", "noticed_forked", "noticed_fresh")
        contenders: dict[str, Callable[[], float]] = {
            name: stack.enter_context(Contender(f"bench_restart:{name}")) for name in names
        }
        seconds = interleave(contenders, rounds=ROUNDS)
    rows = []
    for how in ("forked", "fresh"):
        again = {"ours": seconds[how], "torchrun": seconds["torchrun"], "3 s": [AGAIN_SECONDS] * ROUNDS}
        rows += compare(f"all ranks again after a kill, {how}", again, {"3 s": 1.0, "torchrun": 1.0})
        noticed = {"ours": seconds[f"noticed_{how}"], "1 s": [NOTICED_SECONDS] * ROUNDS}
        rows += compare(f"a killed worker is noticed, {how}", noticed, {"1 s": 1.0})
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
            raise TimeoutError(f"attempt {attempt} has not started")
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
    return lambda: ours("fresh")[1]


def noticed_forked() -> Callable[[], float]:
    return lambda: ours("fork")[0]


def noticed_fresh() -> Callable[[], float]:
    return lambda: ours("fresh")[0]


def ours(start_method: str) -> tuple[float, float]:
    """Return the seconds from the kill until the launcher knows, and until both ranks work again."""
    from notebook_accel import notebook_launcher
    from notebook_accel.events import Event, Failure
    from notebook_accel.stream.record import RunRecord

    moments: list[float] = []
    apply = RunRecord.apply

    def noting(record: RunRecord, event: Event) -> None:
        if isinstance(event, Failure):
            moments.append(time.time())
        apply(record, event)

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(RunRecord, "apply", noting):
        killer = os.fork()  # a thread would forbid the fork of workers
        if killer == 0:
            try:
                Path(folder, "killed.json").write_text(json.dumps(kill(folder)))
            finally:
                os._exit(0)
        notebook_launcher(
            work,
            (folder,),
            num_processes=2,
            max_restarts=1,
            view="none",
            start_method=start_method,  # type: ignore[arg-type]
        )
        os.waitpid(killer, 0)
        killed = json.loads(Path(folder, "killed.json").read_text())
        again = max(moment for _, moment in told(folder, 1))
        return moments[0] - killed, again - killed


def torchrun() -> Callable[[], float]:
    return lambda: command(
        "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"
    )


def command(launcher: str, *flags: str) -> float:
    """Return the seconds from the kill until both ranks of a launcher's script work again.

    Torchrun does not always come back: new workers may find in the store what ended ones wrote, and fail or hang. That
    counts as the whole patience, so as less than it is.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", launcher, *flags]
        words += ["--max-restarts=1", "-m", "tests.benchmarks.bench_restart", folder]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            killed = kill(folder)
            return max(moment for _, moment in told(folder, 1)) - killed
        except TimeoutError:
            return _PATIENCE_SECONDS
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    work(sys.argv[1])
