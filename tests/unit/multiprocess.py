"""Run a module-level function on N gloo processes and collect what each rank returned."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import multiprocessing.util
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from notebook_accel.launch.checks import compiler_preload
from tests.ports import reserve_port

PRELOADED = [
    "torch",
    "notebook_accel.accelerator",
    compiler_preload.MODULE,
]  # optimizers import the compiler, for seconds


class RankFailed(AssertionError):
    """A rank raised, died or did not answer in time; the message holds its traceback."""


class NoAnswer(RankFailed):
    """Ranks did not answer in time."""


def run_ranks(
    function: Callable[..., Any],
    *args: Any,
    world_size: int = 2,
    timeout: float = 240.0,
    environment: dict[str, str] | None = None,
    start_method: str = "forkserver",
    starts_others: bool = False,
) -> list[Any]:
    """Call `function(*args)` in processes with torchrun's variables set; return the results in rank order.

    They come from a warm fork server that has torch and its compiler loaded and has never used them. RankFailed if a
    rank raises, dies or does not answer within `timeout` seconds. Only ranks that say `starts_others` may do so.
    """
    with reserve_port() as port, tempfile.TemporaryDirectory() as stacks:
        environments = [
            _variables(rank, world_size, port) | (environment or {}) for rank in range(world_size)
        ]
        processes, pipes = _start(start_method, not starts_others, (function, args), environments, stacks)
        try:
            answers = _collect(pipes, timeout)
            for pipe in pipes:
                pipe.send_bytes(b"all have answered")
            return answers
        except NoAnswer as error:
            raise NoAnswer(f"{error}\n{_where(processes, Path(stacks))}") from None
        except RankFailed:
            for process in processes:  # the others may wait for the one that failed
                process.kill()
            raise
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()
                process.close()
            for pipe in pipes:
                pipe.close()


World = tuple[int, tuple[Any, ...]]
"""How many ranks there are, and the arguments that they get."""


def run_worlds(
    modules: Sequence[str], function: Callable[..., Any], worlds: Sequence[World], timeout: float
) -> list[list[Any]]:
    """Call a function in several worlds, one after the other; return the results of each, by rank.

    The ranks are forks of one process that has imported these modules for all of them. RankFailed as for `run_ranks`.
    """
    arguments = (modules, function, worlds, timeout)
    total = timeout * len(worlds)
    (results,) = run_ranks(_run_worlds, *arguments, world_size=1, timeout=total, starts_others=True)
    return results  # type: ignore[no-any-return]


def _run_worlds(
    modules: Sequence[str], function: Callable[..., Any], worlds: Sequence[World], timeout: float
) -> list[list[Any]]:
    for module in modules:
        importlib.import_module(module)
    return [
        run_ranks(function, *args, world_size=size, timeout=timeout, start_method="fork")
        for size, args in worlds
    ]


def do_without_deepspeed() -> None:
    """Have this rank take DeepSpeed for not installed: Accelerate imports it to look at any model, for seconds."""
    sys.modules["deepspeed"] = None  # type: ignore[assignment]


def _start(
    start_method: str,
    is_daemon: bool,
    work: tuple[Callable[..., Any], tuple[Any, ...]],
    environments: Sequence[dict[str, str]],
    stacks: str,
) -> tuple[list[Any], list[Connection]]:
    """Start a process for each rank; return the processes, and pipes to them."""
    context = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        context.set_forkserver_preload(PRELOADED)
    pipes, processes = [], []
    for variables in environments:
        receiver, sender = context.Pipe()
        process = context.Process(target=_child, args=(sender, *work, variables, stacks), daemon=is_daemon)  # type: ignore[attr-defined]
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    return processes, pipes


def _collect(pipes: list[Connection], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[str] = []
    deadline = time.monotonic() + timeout
    while len(results) < len(pipes) and not failures:
        pending = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = [rank for rank in range(len(pipes)) if rank not in results]
            raise NoAnswer(f"no answer from ranks {missing} within {timeout} s")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                succeeded, payload = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                succeeded, payload = False, "ended without an answer"
            if succeeded:
                results[rank] = payload
            else:
                failures.append(f"rank {rank}: {payload}")
    if failures:
        raise RankFailed("\n".join(failures))
    return [results[rank] for rank in range(len(pipes))]


def _where(processes: list[Any], stacks: Path) -> str:
    """Let the ranks write down where they are, which ends them, and return what they wrote."""
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
    for process in processes:
        process.join(timeout=20)
        process.kill()
    return "\n".join(f"rank {path.name}:\n{path.read_text()}" for path in sorted(stacks.iterdir()))


def _variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }


def _child(
    sender: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    variables: dict[str, str],
    stacks: str,
) -> None:
    gc.freeze()  # what the fork server had imported is no garbage: collections need not go over it
    os.environ.update(variables)
    multiprocessing.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]  # of the tests' process, which may have lost it
    multiprocessing.set_start_method(
        None, force=True
    )  # loaders start as in any program, not as this rank did
    stack = open(os.path.join(stacks, variables["RANK"]), "w")  # noqa: SIM115 - open as long as the rank lives
    faulthandler.register(signal.SIGUSR1, stack, chain=True)  # and the signal then ends it
    import torch

    from notebook_accel import runtime

    torch.set_num_threads(1)
    runtime.reset()
    try:
        answer = pickle.dumps((True, function(*args)))
    except BaseException:  # whatever it is, the test is told
        answer = pickle.dumps((False, traceback.format_exc()))
    sender.send_bytes(answer)
    with contextlib.suppress(EOFError, OSError):
        sender.recv_bytes()  # a rank that leaves at once resets connections that others still make
    sender.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    multiprocessing.util._run_finalizers()  # type: ignore[attr-defined]  # its own folder, if it needed one
    os._exit(0)
