"""Every argument of a launch, checked before anything starts: all problems at once."""

from __future__ import annotations

import functools
import inspect
import math
import os
import string
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Final

from .. import devices, environ, probes
from . import kernel_state, nodes
from .addresses import unknown, unusable
from .engines import table
from .engines.base import Engine
from .job import ON_HANG, RETURNS, START_METHODS, VIEWS, Job, Rendezvous, StartMethod

PRECISIONS: Final = ("no", "fp16", "bf16", "fp8")
BACKENDS: Final = ("static", "c10d")
OUTPUTS: Final = ("all", "first", "none")
_DAY: Final = 86_400
_OWN_ARGUMENTS: Final = {"backend", "endpoint", "run_id", "min_nodes", "max_nodes", "rank"}
_PREFIX_FIELDS: Final = {"rank": 0, "local_rank": 0, "role_name": ""}


class Problems:
    """Collects what is wrong with the arguments."""

    def __init__(self) -> None:
        self._values: list[str] = []
        self._types: list[str] = []

    def value(self, text: str) -> None:
        """Note an illegal value."""
        self._values.append(text)

    def type(self, text: str) -> None:
        """Note a value of a wrong type."""
        self._types.append(text)

    def one_of(self, name: str, value: object, legal: Sequence[str]) -> None:
        """Note a word that is not among the legal ones."""
        if not isinstance(value, str) or value not in legal:
            self.value(f"{name}={value!r}: choose among {', '.join(map(repr, legal))}")

    def integer(self, name: str, value: object, least: int, most: float = math.inf) -> bool:
        """Note what is no integer within the bounds; return whether it is one."""
        if isinstance(value, bool) or not isinstance(value, Integral):
            self.type(f"{name}={value!r}: an integer is needed, not {type(value).__name__}")
            return False
        if not least <= int(value) <= most:
            bound = f"at least {least}" if value < least else f"at most {most:.0f}"
            self.value(f"{name}={value}: {bound} is needed")
            return False
        return True

    def raise_any(self, function: str) -> None:
        """Raise TypeError where all problems are wrong types, ValueError with all of them otherwise."""
        __tracebackhide__ = True
        texts = self._types + self._values
        if not texts:
            return
        if len(texts) == 1:
            message = f"{function}: {texts[0]}"
        else:
            message = f"{function}: {len(texts)} problems\n" + "\n".join(f"  - {text}" for text in texts)
        raise ValueError(message) if self._values else TypeError(message)


def checked(job: Job, caller: str) -> Job:
    """Return the job with every choice resolved, ready to run.

    Raises:
        ValueError, TypeError: what is wrong with it, all in one message.
    """
    __tracebackhide__ = True
    problems = Problems()
    _check_place(problems)
    place, wrong = nodes.resolved(job.rendezvous)
    if wrong:
        problems.value(wrong)
    job = replace(job, rendezvous=place)
    _check_function(problems, job.function, job.args)
    named = _named_engine(problems, job)
    if named is None or named.on_this_node:
        _check_processes(problems, job)
    _check_precision(problems, job.mixed_precision)
    _check_rendezvous(problems, job.rendezvous)
    _check_restarts(problems, job.max_restarts, job.monitor_interval)
    _check_choices(problems, job)
    _check_prefix(problems, job.prefix)
    _check_log_dir(problems, job.log_dir)
    _check_address(problems, job.address)
    problems.raise_any(caller)
    count = devices.count(job.device_kind) if named is None else named.count(job)
    job = replace(job, num_processes=int(job.num_processes or 0) or count)
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
            port=parse_port(job.rendezvous.port),
            num_nodes=int(job.rendezvous.num_nodes),
            node_rank=int(job.rendezvous.node_rank),
        ),
    )


def _environment(job: Job) -> dict[str, str]:
    """Return what the workers are told: without ACCELERATE_USE_CPU those of Accelerate would each train alone."""
    texts = {**job.environment, "ACCELERATE_MIXED_PRECISION": job.mixed_precision.lower()}
    if job.distributed and job.device_kind is devices.CPU:
        texts["ACCELERATE_USE_CPU"] = "true"
    return texts


def check_call(function: Any, args: Any, caller: str) -> None:
    """Raise ValueError or TypeError where a function cannot be called in workers with these arguments."""
    __tracebackhide__ = True
    problems = Problems()
    _check_function(problems, function, args)
    problems.raise_any(caller)


def _check_function(problems: Problems, function: Any, args: Any) -> None:
    if not isinstance(args, (tuple, list)):
        problems.type(f"args={args!r}: a tuple is needed, for one argument write args=({args!r},)")
    if not callable(function):
        hint = ": pass the function itself, without calling it" if function is None else ""
        problems.type(f"function={function!r} is not callable{hint}")
    elif _is_async(function):
        problems.type(f"function={_name(function)} is async: wrap it with asyncio.run in a plain function")
    elif isinstance(args, (tuple, list)):
        _check_call(problems, function, tuple(args))


def _check_call(problems: Problems, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some built-ins do not tell
    try:
        signature.bind(*args)
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


def _check_processes(problems: Problems, job: Job) -> None:
    if job.num_processes is None or not problems.integer("num_processes", job.num_processes, 1):
        return
    kind = job.device_kind
    if kind is devices.CPU:
        return
    present = devices.count(kind)
    if job.num_processes > present:
        problems.value(
            f"num_processes={job.num_processes}: this machine has {present} "
            f"{kind.label if present == 1 else kind.plural}, so at most {present} is possible; "
            "set ACCELERATE_USE_CPU=1 in the environment to run on CPU processes instead"
        )


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


def _check_rendezvous(problems: Problems, place: Rendezvous) -> None:
    problems.one_of("rdzv_backend", place.backend, BACKENDS)
    _check_settings(problems, place.settings)
    texts = {"master_addr": place.address, "rdzv_endpoint": place.endpoint, "rdzv_id": place.run_id}
    for name, text in texts.items():
        if not isinstance(text, str):
            problems.type(f"{name}={text!r}: a string is needed")
        elif "\0" in text or not text.isprintable():
            problems.value(f"{name}={text!r}: printable characters are needed")
        elif not text and name == "master_addr":
            problems.value("master_addr='': a host name or address is needed")
    number, rank = place.num_nodes, place.node_rank
    if problems.integer("num_nodes", number, 1) & problems.integer("node_rank", rank, 0):
        if rank >= number:
            meaning = ", where 0 is the node that holds the store" if place.is_elastic else ""
            problems.value(
                f"node_rank={rank} with num_nodes={nodes.spoken(place)}: legal are 0 to {number - 1}{meaning}"
            )
        _check_port(problems, place)


def _check_settings(problems: Problems, settings: Any) -> None:
    if settings is None:
        return
    if not isinstance(settings, Mapping) or not all(isinstance(name, str) for name in settings):
        problems.type(f"rdzv_conf={settings!r}: a dict is needed, its keys are names")
        return
    for name in _OWN_ARGUMENTS & set(settings):
        problems.value(f"rdzv_conf={settings!r}: {name} is set by an argument of the launch")
    for name in {"timeout", "join_timeout", "last_call_timeout", "keep_alive_interval"} & set(settings):
        if not _is_seconds(settings[name]):
            problems.value(f"rdzv_conf={settings!r}: {name} is a number of seconds, more than 0")


def _is_seconds(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) <= _DAY


def _check_port(problems: Problems, place: Rendezvous) -> None:
    port = parse_port(place.port)
    if port is None:
        problems.value(f"use_port={place.port!r}: a port from 0 to 65535 is needed, or None for a free one")
    elif port == 0 and (place.num_nodes > 1 or place.is_elastic) and not place.endpoint:
        problems.value(
            f"use_port={place.port!r} with num_nodes={nodes.spoken(place)}: the nodes must agree on a port, name one"
        )
    elif port and _opens_port(place) and (reason := unusable("", port)):
        problems.value(
            f"use_port={place.port!r}: the port cannot be opened ({reason}); "
            "leave use_port out and a free one is used"
        )
    if place.num_nodes == 1 and isinstance(place.address, str) and (reason := unusable(place.address, 0)):
        problems.value(
            f"master_addr={place.address!r} is no address of this machine ({reason}); "
            "leave master_addr out for a run on one node"
        )
    several = place.num_nodes > 1 and not place.endpoint
    if several and isinstance(place.address, str) and (reason := unknown(place.address)):
        problems.value(f"master_addr={place.address!r}: this machine finds no such host ({reason})")
    if place.endpoint and isinstance(place.endpoint, str):
        host, _, digits = place.endpoint.rpartition(":")
        if not host or not digits.isdecimal() or not parse_port(digits):
            problems.value(f"rdzv_endpoint={place.endpoint!r}: host:port is needed, a port from 1 to 65535")
        elif reason := unknown(host.strip("[]")):
            problems.value(f"rdzv_endpoint={place.endpoint!r}: this machine finds no such host ({reason})")


def _opens_port(place: Rendezvous) -> bool:
    """Whether this node alone can be the one that opens the port; under c10d another one of this machine may have."""
    return place.num_nodes == 1 or (place.backend == "static" and place.node_rank == 0)


def parse_port(use_port: Any) -> int | None:
    """Return the port, 0 for any free one, None where it is no port."""
    if use_port is None:
        return 0
    if isinstance(use_port, str) and use_port.isdecimal() and len(use_port) < 20:
        use_port = int(use_port)
    if isinstance(use_port, bool) or not isinstance(use_port, Integral):
        return None
    use_port = int(use_port)
    return use_port if 0 <= use_port <= 65535 else None


def _check_choices(problems: Problems, job: Job) -> None:
    problems.one_of("start_method", job.start_method, START_METHODS)
    problems.one_of("returns", job.returns, RETURNS)
    problems.one_of("view", job.view, VIEWS)
    problems.one_of("on_hang", job.on_hang, ON_HANG)
    if job.hang_timeout is not None and not _is_seconds(job.hang_timeout):
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
    elif not _is_seconds(monitor_interval):
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
