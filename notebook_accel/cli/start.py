"""Starts what a plan says: one process in place of this one, or a launch of several."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

import rich_click as click

from .. import environ
from ..config import arguments
from ..errors import HangError, LaunchError
from ..events import Failure, RaisedError
from ..launch.script import Script
from ..takeover import finder
from .console import Console
from .plan import Plan

_REFUSED: Final = 2
_LINE: Final = 200  # characters of a message; the traceback has all of it
_INTERRUPTED: Final = 130  # the exit code of what Ctrl-C ended, as shells have it


def start(plan: Plan, script: Script, *, quiet: bool, in_place: bool = True) -> int:
    """Run a script as a plan says.

    Args:
        plan: how to run it.
        script: what to run.
        quiet: whether to say nothing but what the script says.
        in_place: whether a single process takes the place of this one.

    Returns:
        The exit code.
    """
    if not plan.is_distributed:
        return _run_single(describe_command(script), {**plan.environment, **plan.derived}, in_place)
    from ..launch import preflight, registry
    from ..stream.logs import LogFiles

    try:
        job, engine = preflight.check(plan.make_request(script), "notebook-accel launch")
    except (ValueError, TypeError) as error:
        click.echo(f"Error: {arguments.name_as_in_files(str(error))}", err=True)
        return _REFUSED
    console = Console(job.output, job.prefix or "", role=plan.config.role, quiet=quiet)
    sinks: list[Any] = [lambda run: console]
    if (folder := plan.config.log_dir) is not None:
        sinks.append(lambda run: LogFiles(folder, run.job.name))
    try:
        run = registry.open_run(job, engine, sinks)
        with _forward_signals(run, console) as signals:
            run.execute()
    except LaunchError as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        console.say(f"the nodes did not meet: {reason}" if job.rendezvous.num_nodes > 1 else reason)
        return 1
    if signals:
        console.say(f"ended by {signals[0].name}, with all processes")
        return 128 + signals[0]
    return _report(run, console)


def describe_command(script: Script) -> list[str]:
    """Return the words that run a script in a single process."""
    if script.kind == "program":
        return list(script.words)
    return [sys.executable, *(["-m"] if script.kind == "module" else []), *script.words]


def _run_single(command: Sequence[str], environment: Mapping[str, str], in_place: bool) -> int:
    texts = finder.complete_variables({**environ.snapshot(), **environment})
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # it was closed before this began
            stream.flush()
    if in_place:
        _become(command, texts)
    return subprocess.run(command, env=texts, check=False).returncode


def _become(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    os.execvpe(command[0], list(command), environment)


@contextlib.contextmanager
def _forward_signals(run: Any, console: Console) -> Iterator[list[signal.Signals]]:
    """Pass the signals that end this process on to the run meanwhile; the second one kills all processes.

    Yields:
        The signals that came.
    """
    came: list[signal.Signals] = []

    def handle(signum: int, frame: Any) -> None:
        came.append(signal.Signals(signum))
        if len(came) > 1:
            _kill_own()
            return
        if signum == signal.SIGINT:
            console.say("ending all processes; a second Ctrl-C kills them")
        run.end(signum)

    named = [signal.SIGINT, signal.SIGTERM, signal.SIGQUIT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup has it
        named.append(signal.SIGHUP)
    before = {signum: signal.signal(signum, handle) for signum in named}
    try:
        yield came
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _kill_own() -> None:
    """Kill what this process and its ranks have started, except what has a session of its own: it is to live on."""
    import psutil

    this = psutil.Process()
    sessions = {os.getsid(0), *(child.pid for child in this.children())}  # each rank leads one
    for process in this.children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):  # it has ended
            if os.getsid(process.pid) in sessions:
                process.kill()


def _report(run: Any, console: Console) -> int:
    """Say how the run ended, and return the exit code: that of the rank that failed first."""
    from ..launch.transfer import failures

    if run.failure is None:
        return 0
    if isinstance(run.failure, HangError):
        console.say("all processes were ended, because nothing went on any more")
        return 1
    first = run.first_failure
    if first is None:
        console.say(failures.describe_error(run.failure))
        return 1
    if first.error is not None and not console.has_traceback:  # a worker of Ray or XLA sends the error alone
        error = failures.revive(first.error, first.rank, first.pid)
        console.show_traceback("".join(traceback.format_exception(error)))
    console.say(_describe_first(first, console.first_rank, run.failed_node))
    for failure in console.failures:
        if failure.rank != first.rank and failure.error is not None:
            console.say(f"rank {failure.rank} failed after it: {_first_line(failure.error)}")
    return _exit_code(first)


def _describe_first(failure: Failure, first_rank: int, node: str) -> str:
    from ..launch import rank_names, signals
    from ..launch.transfer import failures

    where = f"rank {failure.rank} (local rank {failure.rank - first_rank}, process {failure.pid})"
    if failure.node:
        where = rank_names.name_process(failure.rank, failure.pid, failure.node)
    elif node:
        where = f"rank {failure.rank} (process {failure.pid}) on {node}"
    if failure.lost:
        return f"{where} is lost: {failure.lost}"
    if failure.error is None and (failure.exitcode or 0) < 0:
        signum = -(failure.exitcode or 0)
        cause = failures.find_killer(failure)
        return f"{where} was ended by {signals.name_of(signum)}{cause and f': {cause}'}"
    if failure.error is None and failure.exitcode is None:
        return f"{where} ended first, and nobody knows with which exit code"
    reason = f" ({_first_line(failure.error)})" if node and failure.error is not None else ""
    return f"{where} failed first, with exit code {_exit_code(failure)}{reason}"


def _first_line(error: RaisedError) -> str:
    """Return an exception in one line, as Python ends a traceback with it."""
    lines = error.message.splitlines()
    text = textwrap.shorten(lines[0], _LINE) if lines else ""
    return f"{error.type_name}: {text}" if text else error.type_name


def _exit_code(failure: Failure) -> int:
    if failure.error is not None:
        return _INTERRUPTED if failure.error.type_name == "KeyboardInterrupt" else 1
    code = failure.exitcode or 0
    return 128 - code if code < 0 else code or 1
