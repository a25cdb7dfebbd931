"""Starts what a plan says: one process in place of this one, or several by torch elastic."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NoReturn

import rich_click as click

from .. import environ
from ..errors import LaunchError
from ..launch import signals
from ..launch.job import Rendezvous
from . import process
from .plan import Plan

_PROCESS: Final = str(Path(process.__file__).resolve())
_PORT: Final = 29500
_RUN_ID: Final = "notebook-accel"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What is run.

    Attributes:
        kind: `script`, `module`, or `program`, which is run without Python.
        words: its name and its arguments.
    """

    kind: str
    words: tuple[str, ...]

    @property
    def command(self) -> tuple[str, ...]:
        """The words of a single process."""
        if self.kind == "program":
            return self.words
        return (sys.executable, *(("-m",) if self.kind == "module" else ()), *self.words)


def start(plan: Plan, target: Target, *, quiet: bool) -> int:
    """Run the plan and return the exit code; a single process takes the place of this one where systems can."""
    if not plan.is_distributed:
        return _single(target.command, {**plan.environment, **plan.derived})
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="notebook_accel_"))
        return _elastic(plan, target, folder, quiet=quiet)


def _single(command: Sequence[str], environment: Mapping[str, str]) -> int:
    texts = {**environ.snapshot(), **environment}
    sys.stdout.flush()
    sys.stderr.flush()
    if sys.platform != "win32":
        _become(command, texts)
    return subprocess.run(command, env=texts, check=False).returncode


def _become(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    os.execvpe(command[0], list(command), environment)


def _elastic(plan: Plan, target: Target, folder: str, *, quiet: bool) -> int:
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    if not environ.get("LOGLEVEL"):  # with which torch's own launcher is asked for more
        _silence("torch.distributed.elastic")
    _end_at_second_signal(quiet=quiet)
    environ.put({**plan.environment, **plan.derived})
    if target.kind == "program":
        command = target.words
    else:
        command = (sys.executable, _PROCESS, folder, *target.command[1:])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # elastic replaces $$ and ${local_rank} in arguments
            arguments = [word.replace("$", "$$") for word in command[1:]]
            elastic_launch(_settings(plan, folder), command[0])(*arguments)
    except ChildFailedError as error:
        return _failed(error.failures, folder, quiet=quiet)
    except (DistError, LaunchError, RendezvousError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        click.echo(f"notebook-accel: the nodes did not meet: {reason}", err=True)
        return 1
    except (SignalException, KeyboardInterrupt) as error:
        signum = signal.Signals(getattr(error, "sigval", signal.SIGINT))
        _say(f"ended by {signum.name}, with all processes", quiet=quiet)
        return 128 + signum
    return 0


def _end_at_second_signal(*, quiet: bool) -> None:
    """Let a second signal kill what the first one asked to end: torch's own handler begins to wait anew, for 30 s."""
    from torch.distributed.elastic.multiprocessing import api

    own = api._terminate_process_handler
    seen: list[int] = []

    def handle(signum: int, frame: Any) -> None:
        if not seen:
            seen.append(signum)
            if signum == signal.SIGINT:
                _say("ending all processes; a second Ctrl-C kills them", quiet=quiet)
            own(signum, frame)
        signals.kill_groups([], signals.descendants([os.getpid()]))

    api._terminate_process_handler = handle


def _silence(package: str) -> None:
    """Quieten a package's loggers, each of which has a level of its own."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(package):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _settings(plan: Plan, folder: str) -> Any:
    """Return torch elastic's options."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry
    from torch.distributed.launcher.api import LaunchConfig

    from ..launch.engines.nodes.rendezvous import PatientNodes, SingleNode

    config = plan.config
    more: dict[str, Any] = dict(part.split("=", 1) for part in config.rdzv_conf.split(",") if part)
    place = Rendezvous(
        address=config.main_process_ip or "127.0.0.1",
        port=config.main_process_port or (_PORT if config.num_machines > 1 else None),
        node_rank=config.machine_rank,
        num_nodes=config.num_machines,
        run_id=_RUN_ID,
        settings=more,
    )
    handler: Any = PatientNodes(place) if config.num_machines > 1 else SingleNode(place)
    backend, endpoint = handler.get_backend(), f"{place.address}:{place.port}"
    if config.num_machines > 1 and config.rdzv_backend != "static":
        backend = config.rdzv_backend
        if config.machine_rank > 0:  # the address may be one of this machine too
            more.setdefault("is_host", "false")
    else:
        rendezvous_handler_registry.register(backend, lambda parameters: handler)
    return LaunchConfig(
        min_nodes=config.num_machines,
        max_nodes=config.num_machines,
        nproc_per_node=plan.local_world_size,
        run_id=_RUN_ID,
        role=config.role,
        rdzv_backend=backend,
        rdzv_endpoint=endpoint,
        rdzv_configs=more,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        logs_specs=DefaultLogsSpecs(
            log_dir=config.log_dir or os.path.join(folder, "logs"), tee=Std.from_str(config.tee)
        ),
    )


def _failed(failures: Mapping[int, Any], folder: str, *, quiet: bool) -> int:
    """Say which rank failed first, and return its exit code."""
    attempt = max((int(path.name.split("-")[1]) for path in Path(folder).glob("first-*")), default=0)
    first = Path(folder, process.FIRST.format(attempt=attempt))
    rank = int(first.read_text()) if first.exists() else -1
    if rank not in failures:
        # the others were ended by elastic, after the one that failed
        own = {rank: one for rank, one in failures.items() if one.exitcode != -signal.SIGTERM} or failures
        rank = min(own, key=lambda rank: (own[rank].timestamp, rank))
    failure = failures[rank]
    where = f"rank {rank} (local rank {failure.local_rank}, process {failure.pid})"
    if failure.exitcode < 0:
        cause = signals.likely_cause(-failure.exitcode)
        _say(
            f"{where} was ended by {signals.name_of(-failure.exitcode)}{cause and f': {cause}'}", quiet=quiet
        )
    else:
        _say(f"{where} failed first, with exit code {failure.exitcode}", quiet=quiet)
    prefix = process.LATER.format(attempt=attempt, rank="")
    for path in sorted(Path(folder).glob(f"{prefix}*")):
        lines = path.read_text(encoding="utf-8").splitlines() or [""]
        _say(f"rank {path.name.removeprefix(prefix)} failed after it: {lines[0]}", quiet=quiet)
    return 128 - failure.exitcode if failure.exitcode < 0 else int(failure.exitcode)


def _say(text: str, *, quiet: bool) -> None:
    if not quiet:
        click.echo(f"notebook-accel: {text}", err=True)
