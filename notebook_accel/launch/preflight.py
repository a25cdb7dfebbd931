"""Every argument of a launch, checked before anything starts: all problems at once."""

from __future__ import annotations

import functools
import inspect
import os
import string
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Final

from .. import devices, environ, probes, tpu
from ..errors import LaunchError
from . import chips, kernel_state, nodes
from .engines import table
from .engines.base import Engine
from .job import ON_HANG, RETURNS, START_METHODS, VIEWS, Job, StartMethod
from .problems import Problems, is_seconds

PRECISIONS: Final = ("no", "fp16", "bf16", "fp8")
OUTPUTS: Final = ("all", "first", "none")
_PREFIX_FIELDS: Final = {"rank": 0, "local_rank": 0, "role_name": ""}


def checked(job: Job, caller: str) -> Job:
    """Return the job with every choice resolved, ready to run.

    Raises:
        ValueError, TypeError: what is wrong with it, all in one message.
    """
    __tracebackhide__ = True
    problems = Problems()
    if not _check_environment(problems, job.environment):
        job = replace(job, environment={})  # the rest is checked without
    _check_place(problems)
    place, wrong = nodes.resolved(job.rendezvous)
    if wrong:
        problems.value(wrong)
    job = replace(job, rendezvous=place)
    _check_function(problems, job.function, job.args)
    named = _named_engine(problems, job)
    job = job if named is None else replace(job, engine=named)
    _check_xla(problems, job)
    _check_processes(problems, job, here=named is None or named.on_this_node)
    _check_precision(problems, job.mixed_precision)
    nodes.check(problems, job.rendezvous)
    _check_restarts(problems, job.max_restarts, job.monitor_interval)
    _check_choices(problems, job)
    _check_deepspeed(problems, job, here=named is None or named.on_this_node)
    _check_prefix(problems, job.prefix)
    _check_log_dir(problems, job.log_dir)
    _check_address(problems, job.address)
    problems.raise_any(caller)
    if job.num_processes is None:
        count = _count(job) if named is None else _counted(problems, named, job)
        problems.raise_any(caller)
        job = replace(job, num_processes=count)
    job = replace(job, num_processes=int(job.local_world_size))
    _check_sizes(problems, job)
    engine = named or table.engine_for(job)
    job = replace(job, engine=engine)
    _check_refused(problems, job, engine)
    problems.raise_any(caller)
    start_method = job.start_method
    if engine.has_workers and engine.on_this_node:
        start_method = _start_method(problems, job)
    problems.raise_any(caller)
    return replace(
        job,
        args=tuple(job.args),
        start_method=start_method,
        max_restarts=int(job.max_restarts),
        monitor_interval=float(job.monitor_interval),
        environment=_environment(job),
        rendezvous=replace(
            job.rendezvous,
            port=nodes.parse_port(job.rendezvous.port),
            num_nodes=int(job.rendezvous.num_nodes),
            node_rank=int(job.rendezvous.node_rank),
        ),
    )


def _environment(job: Job) -> dict[str, str]:
    """Return what the workers are told: without ACCELERATE_USE_CPU those of Accelerate would each train alone."""
    texts = {**job.environment, "ACCELERATE_MIXED_PRECISION": job.mixed_precision.lower()}
    elsewhere = isinstance(job.engine, Engine) and not job.engine.on_this_node
    if job.distributed and not elsewhere and job.device_kind is devices.CPU:
        texts["ACCELERATE_USE_CPU"] = "true"
    if job.device_kind is devices.XLA:
        texts = {**chips.variables(job.tpu_mode), **texts}
    return texts


def check_call(function: Any, args: Any, kwargs: Mapping[str, Any], caller: str) -> None:
    """Raise ValueError or TypeError where a function cannot be called in workers with these arguments."""
    __tracebackhide__ = True
    problems = Problems()
    _check_function(problems, function, args, kwargs)
    problems.raise_any(caller)


def check_environment(environment: Any, caller: str) -> None:
    """Raise ValueError or TypeError where processes cannot be given these variables."""
    __tracebackhide__ = True
    problems = Problems()
    _check_environment(problems, environment)
    problems.raise_any(caller)


def check_seconds(least: float = 0.0, /, **seconds: Any) -> None:
    """Raise ValueError or TypeError where something is no number of seconds, `least` or more."""
    __tracebackhide__ = True
    for name, value in seconds.items():
        if not isinstance(value, Real) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r}: seconds are needed")
        if not float(value) >= least:  # nor is NaN
            raise ValueError(f"{name}={value!r}: {least:g} seconds or more are needed")


def _check_environment(problems: Problems, environment: Any) -> bool:
    """Note what cannot be given to processes; return whether it is a mapping of texts at all."""
    if not isinstance(environment, Mapping) or not all(
        isinstance(text, str) for pair in environment.items() for text in pair
    ):
        problems.type(f"environment={environment!r}: a dict is needed, its names and values are strings")
        return False
    for name, value in environment.items():
        if not name or "=" in name or "\0" in name + value:
            problems.value(f"environment={{{name!r}: {value!r}}}: no system takes such a variable")
    return True


def _check_deepspeed(problems: Problems, job: Job, *, here: bool) -> None:
    """Note what would stop every worker of a launch that is configured for DeepSpeed."""
    if "ACCELERATE_USE_DEEPSPEED" not in job.environment:
        return
    from ..zero import chosen

    for text in chosen.wrong_in(job.environment, str(job.mixed_precision).lower(), here=here):
        problems.value(text)


def _check_sizes(problems: Problems, job: Job) -> None:
    """Note sizes of several kinds of parallelism that are not those of the run."""
    if "ACCELERATE_USE_PARALLELISM_CONFIG" not in job.environment or job.rendezvous.is_elastic:
        return
    from .. import parallelism

    for text in parallelism.wrong_in(job.environment, job.local_world_size * int(job.rendezvous.num_nodes)):
        problems.value(text)


def _check_function(
    problems: Problems, function: Any, args: Any, kwargs: Mapping[str, Any] | None = None
) -> None:
    if not isinstance(args, (tuple, list)):
        problems.type(f"args={args!r}: a tuple is needed, for one argument write args=({args!r},)")
    if not callable(function):
        hint = ": pass the function itself, without calling it" if function is None else ""
        problems.type(f"function={function!r} is not callable{hint}")
    elif _is_async(function):
        problems.type(f"function={_name(function)} is async: wrap it with asyncio.run in a plain function")
    elif isinstance(args, (tuple, list)):
        _check_call(problems, function, tuple(args), kwargs or {})


def _check_call(
    problems: Problems, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some built-ins do not tell
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        problems.type(
            f"args has {len(args)} values, but the call would be {_name(function)}{signature}: {error}"
        )


def _is_async(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    tests = (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    return any(test(part) for test in tests for part in (function, getattr(function, "__call__", None)))  # noqa: B004


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__


def _check_processes(problems: Problems, job: Job, *, here: bool) -> None:
    if job.num_processes is None or not problems.integer("num_processes", job.num_processes, 1) or not here:
        return
    kind = job.device_kind
    if kind is devices.CPU:
        return
    present = _count(job)
    if job.num_processes > present:
        problems.value(
            f"num_processes={job.num_processes}: this machine has {present} "
            f"{kind.label if present == 1 else kind.plural}, so at most {present} is possible; "
            "set ACCELERATE_USE_CPU=1 in the environment to run on CPU processes instead"
        )


def _count(job: Job) -> int:
    """Return how many processes a job has that names no number."""
    if isinstance(job.engine, Engine):
        return job.engine.count(job)
    return 1 if job.tpu_mode == "spmd" else devices.count(job.device_kind)


def _check_xla(problems: Problems, job: Job) -> None:
    """Note what a TPU lacks, also where it would be chosen but for that."""
    problems.one_of("tpu_mode", job.tpu_mode, tpu.MODES)
    said = environ.flag_in(job.environment, "ACCELERATE_USE_CPU")
    if environ.flag("ACCELERATE_USE_CPU") if said is None else said:
        if job.device_kind is devices.XLA:
            problems.value(
                "ACCELERATE_USE_CPU is set, and XLA devices were asked for: unset it, or do not ask"
            )
    elif job.device_kind is devices.XLA or (job.engine == table.AUTO and tpu.is_here()):
        for text in chips.missing(job.environment):
            problems.value(text)


def _named_engine(problems: Problems, job: Job) -> Engine | None:
    """Return the engine that was asked for by name or itself; None where nobody did, or where it cannot be had."""
    if job.engine == table.AUTO:
        return None
    try:
        return table.engine_for(job)
    except ValueError as error:
        problems.value(str(error))
    except TypeError as error:
        problems.type(str(error))
    return None


def _counted(problems: Problems, engine: Engine, job: Job) -> int:
    """Return how many processes the job is to have; an engine that has a cluster may not reach it."""
    try:
        return engine.count(job)
    except LaunchError as error:
        problems.value(str(error))
        return 0


def _check_refused(problems: Problems, job: Job, engine: Engine) -> None:
    """Note the arguments that mean nothing to the engine, and what else hinders it."""
    given = {
        "num_processes": (job.num_processes, job.local_world_size > 1),
        "num_nodes": (job.rendezvous.num_nodes, job.rendezvous.num_nodes > 1 or job.rendezvous.is_elastic),
        "max_restarts": (job.max_restarts, job.max_restarts > 0),
        "block": (not job.background, job.background),
        "on_hang": (job.on_hang, job.on_hang == "raise"),
        "log_dir": (job.log_dir, job.log_dir is not None),
        "address": (job.address, job.address is not None),
        "tpu_mode": (job.tpu_mode, job.tpu_mode != "process"),
    }
    for name, (value, differs) in given.items():
        if differs and name in engine.refuses:
            problems.value(f"{name}={value!r} with engine={engine.name!r}: {engine.refuses[name]}")
    if job.start_method not in ("auto", *engine.start_methods) and job.start_method in START_METHODS:
        known = ", ".join(map(repr, ("auto", *engine.start_methods)))
        problems.value(f"start_method={job.start_method!r} with engine={engine.name!r}: it knows {known}")
    for text in engine.problems(job):
        problems.value(text)


def _check_precision(problems: Problems, mixed_precision: Any) -> None:
    word = mixed_precision.lower() if isinstance(mixed_precision, str) else mixed_precision
    problems.one_of("mixed_precision", word, PRECISIONS)
    if isinstance(word, str) and word == "fp8" and not probes.is_available("torchao"):
        problems.value(
            "mixed_precision='fp8': torchao computes in it, which is not installed: pip install torchao"
        )


def _check_choices(problems: Problems, job: Job) -> None:
    problems.one_of("start_method", job.start_method, START_METHODS)
    problems.one_of("returns", job.returns, RETURNS)
    problems.one_of("view", job.view, VIEWS)
    problems.one_of("on_hang", job.on_hang, ON_HANG)
    if job.hang_timeout is not None and not is_seconds(job.hang_timeout):
        problems.value(
            f"hang_timeout={job.hang_timeout!r}: seconds are needed, a day at most, or None for never"
        )
    if job.view == "auto" and (asked := environ.get("NOTEBOOK_ACCEL_VIEW")) is not None:
        problems.one_of("environment variable NOTEBOOK_ACCEL_VIEW", asked, VIEWS)
    output = job.output
    if isinstance(output, (str, bytes)) or not isinstance(output, Collection):
        problems.one_of("output", output, OUTPUTS)
    elif not all(isinstance(rank, Integral) and not isinstance(rank, bool) and rank >= 0 for rank in output):
        problems.value(f"output={output!r}: a collection of ranks is needed, each 0 or more")
    elif isinstance(job.num_processes, Integral) and isinstance(job.rendezvous.num_nodes, Integral):
        world = job.num_processes * job.rendezvous.num_nodes
        if world > 0 and any(rank >= world for rank in output):
            problems.value(f"output={output!r}: the ranks of this run are 0 to {world - 1}")


def _check_prefix(problems: Problems, prefix: Any) -> None:
    if prefix is None:
        return
    if not isinstance(prefix, str):
        problems.type(f"log_line_prefix_template={prefix!r}: a string is needed")
        return
    try:
        string.Template(prefix).substitute(_PREFIX_FIELDS)
    except (KeyError, ValueError) as error:
        problems.value(
            f"log_line_prefix_template={prefix!r} ({error}): it may name ${{rank}}, ${{local_rank}} and ${{role_name}}"
        )


def _check_address(problems: Problems, address: Any) -> None:
    if address is not None and not isinstance(address, str):
        problems.type(f"address={address!r}: a string is needed")


def _check_log_dir(problems: Problems, log_dir: Any) -> None:
    if log_dir is None:
        return
    if not isinstance(log_dir, (str, os.PathLike)):
        problems.type(f"log_dir={log_dir!r}: the path of a folder is needed")
        return
    if not str(log_dir) or "\0" in str(log_dir):
        problems.value(f"log_dir={log_dir!r}: the path of a folder is needed")
        return
    path = Path(log_dir).expanduser()
    there = next((parent for parent in (path, *path.absolute().parents) if parent.exists()), path)
    if not there.is_dir():
        problems.value(f"log_dir={str(log_dir)!r}: {there} is a file, the path of a folder is needed")
    elif not os.access(there, os.W_OK):
        problems.value(f"log_dir={str(log_dir)!r}: {there} cannot be written to")


def _check_restarts(problems: Problems, max_restarts: Any, monitor_interval: Any) -> None:
    problems.integer("max_restarts", max_restarts, 0, 1_000_000)
    if not isinstance(monitor_interval, Real) or isinstance(monitor_interval, bool):
        problems.type(f"monitor_interval={monitor_interval!r}: seconds are needed")
    elif not is_seconds(monitor_interval):
        problems.value(f"monitor_interval={monitor_interval}: more than 0 seconds are needed, a day at most")


def _check_place(problems: Problems) -> None:
    world = environ.integer("WORLD_SIZE")
    if environ.get("RANK") is not None and world is not None and world > 1:
        problems.value(
            f"this process is rank {environ.get('RANK')} of a run of {world}: "
            "a launch starts in a notebook or script, not inside a worker"
        )


def _check_directory(problems: Problems) -> None:
    """Check that fresh processes have a place to start in."""
    try:
        os.getcwd()
    except OSError as error:
        problems.value(
            f"the working directory cannot be used ({error.strerror}): change to another with os.chdir"
        )


def _start_method(problems: Problems, job: Job) -> StartMethod:
    """Return how processes are to start: a fork where this process may be forked, else a fork server."""
    asked = job.start_method
    if sys.platform == "win32" and asked in ("fork", "forkserver"):
        problems.value(f"start_method={asked!r}: Windows has 'spawn' only; choose 'auto'")
    if sys.platform == "win32":
        _check_directory(problems)
        return "spawn"
    if asked in ("forkserver", "spawn"):
        _check_directory(problems)
        return asked
    unclean = list(map(str, kernel_state.reasons()))
    if job.rendezvous.num_nodes > 1:
        unclean.append("a thread of this process may serve other nodes at that moment")
    if job.background:
        unclean.append("this process goes on while workers start")
    if asked == "fork" and unclean:
        why = "; ".join(unclean)
        problems.value(
            f"start_method='fork': a forked worker could hang or fail, because {why}; choose 'auto'"
        )
    if asked == "auto" and automatic(unclean) != "fork":
        _check_directory(problems)
        return "forkserver"
    return "fork"


def automatic(unclean: Sequence[object]) -> StartMethod:
    """Return how processes start where nobody chose, for the reasons why this process may not be forked."""
    if sys.platform == "win32":
        return "spawn"
    return "fork" if sys.platform == "linux" and not unclean else "forkserver"
