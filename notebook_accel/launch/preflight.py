"""Checks all arguments of a launch before anything starts, reports all problems at once, and makes every choice."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from .. import devices, environ, probes, tpu
from ..caller import warn
from ..config import arguments
from ..config.argument_checks import find_problems, parse_port, replace_old_words
from ..errors import LaunchError
from .checks import fork_safety, node_options, xla_runtime
from .checks.problems import raise_all
from .engines import base
from .engines.base import Engine
from .job import Job, Rendezvous
from .request import LaunchRequest
from .script import Script

Options = Mapping[str, Any]
"""All arguments of `notebook_launcher` by name. An argument that is not in the request has its default."""
Problems = list[Exception]
"""What is wrong, one ValueError or TypeError for each problem. `raise_all` raises them as one exception."""

_LIBRARIES: Final = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")
_NODE_OPTIONS: Final = (
    "num_nodes",
    "node_rank",
    "master_addr",
    "use_port",
    "rdzv_backend",
    "rdzv_endpoint",
    "rdzv_id",
    "rdzv_conf",
    "secret",
)


class Machine(NamedTuple):
    """What a launch has to know about this machine.

    Attributes:
        has_tpu: whether the machine has a TPU.
        kind: kind of device that the processes compute on.
        is_usable: whether all is there that this kind needs; else nobody knows how many devices there are.
    """

    has_tpu: bool
    kind: devices.DeviceKind
    is_usable: bool = True


def check(request: LaunchRequest, caller: str) -> tuple[Job, Engine]:
    """Check a request, and prepare it: its start method is resolved, and what its workers need is imported.

    Args:
        request: what the user asked for.
        caller: name of the function that the user called, for messages.

    Returns:
        The job, ready to run, and the engine that runs it.

    Raises:
        ValueError, TypeError: everything that is wrong with the request, in one message.
        KeyboardInterrupt: it was interrupted, while hosts were asked for example.
    """
    __tracebackhide__ = True
    try:
        job, engine = resolve(request, caller)
        if job.rendezvous.num_nodes > 1 and (exposure := node_options.find_exposure(job.rendezvous)):
            warn(exposure)
        return _prepare(job, engine, caller), engine
    except KeyboardInterrupt:  # without our own frames
        raise KeyboardInterrupt(f"{caller}: no worker was started yet") from None


def resolve(request: LaunchRequest, caller: str) -> tuple[Job, Engine]:
    """Check a request and resolve it to a job and an engine. Nothing is imported for it.

    Args:
        request: what the user asked for.
        caller: name of the function that the user called, for messages.

    Returns:
        The job, its start method as the user chose it, and the engine that runs it.

    Raises:
        ValueError, TypeError: everything that is wrong with the request, in one message.
    """
    __tracebackhide__ = True
    variables = environ.snapshot()
    options = replace_old_words({**arguments.defaults(), **request.options})
    wrong = find_problems(arguments.checks(), options, variables)
    problems: Problems = [problem for found in wrong.values() for problem in found]
    environment: dict[str, str] = {} if "environment" in wrong else dict(options["environment"] or {})
    options["environment"] = environment  # engines read it before a wrong one is reported
    if not isinstance(request.function, Script):  # a cluster may give a rank to a script's command
        _check_no_worker(problems, variables)
    requested = _find_requested_engine(problems, _find_implied_engine(options, wrong))
    machine = _look_at_machine(problems, options, requested, variables, environment)
    rendezvous = _resolve_nodes(problems, options, wrong, requested)
    _check_function(problems, request.function, request.args)
    if "num_processes" not in wrong:
        _check_processes(problems, options, machine, requested)
    _check_options(problems, options, wrong, requested)  # before it looks at its hosts
    _check_libraries(problems, options, environment, here=requested is None or requested.on_this_node)
    raise_all(problems, caller)
    count = _count_processes(problems, options, machine, requested)
    raise_all(problems, caller)
    needs_workers = _needs_workers(request, options, rendezvous, environment, count)
    engine = requested or base.find(_choose_engine(options, machine, needs_workers))
    del options["secret"]  # the rendezvous has it, and what has the options may be shown
    job = Job(
        function=request.function,
        args=tuple(request.args),
        name=options["name"] or _get_name(request.function),
        engine=engine.name,
        local_world_size=count,
        device_kind=engine.device_kind or machine.kind,
        distributed=engine.has_workers,
        mixed_precision=options["mixed_precision"].lower(),
        start_method=options["start_method"],
        returns=options["returns"],
        output=options["output"],
        rendezvous=rendezvous,
        max_restarts=int(options["max_restarts"]),
        monitor_interval=float(options["monitor_interval"]),
        prefix=options["log_line_prefix_template"],
        view=options["view"],
        environment=environment,
        background=not options["block"],
        log_dir=options["log_dir"],
        hang_timeout=options["hang_timeout"],
        on_hang=options["on_hang"],
        address=options["address"],
        tpu_mode=options["tpu_mode"],
        options=options,
        quiet=request.quiet,
        serve=request.serve,
    )
    _check_world(problems, job)
    _check_options(problems, job.options, (), engine if requested is None else None)
    _check_engine(problems, job, engine)
    raise_all(problems, caller)
    return job, engine


def _prepare(job: Job, engine: Engine, caller: str) -> Job:
    """Return the job with its start method resolved and with all variables of its workers."""
    __tracebackhide__ = True
    problems: Problems = []
    job = replace(job, environment=_make_worker_environment(job, engine))
    if not (engine.has_workers and engine.on_this_node):
        return job
    start_method = fork_safety.resolve_start_method(problems, job)
    raise_all(problems, caller)
    # imports may start threads that forbid the fork
    if job.serve is None and engine.preload(job, start_method):
        start_method = fork_safety.resolve_start_method(problems, job)
        raise_all(problems, caller)
    return replace(job, start_method=start_method)


def check_call(function: Any, args: Any, kwargs: Mapping[str, Any], caller: str) -> None:
    """Check that workers can call a function with these arguments.

    Args:
        function: what the workers will call.
        args: its positional arguments.
        kwargs: its arguments by name.
        caller: name of the function that the user called, for messages.

    Raises:
        ValueError, TypeError: everything that is wrong, in one message.
    """
    __tracebackhide__ = True
    problems: Problems = []
    _check_function(problems, function, args, kwargs)
    raise_all(problems, caller)


# -- the machine


def _check_no_worker(problems: Problems, variables: Mapping[str, str]) -> None:
    """Check that this process is not a worker of another launch."""
    rank, size = variables.get("RANK"), variables.get("WORLD_SIZE", "")
    if rank is not None and size.strip().isdecimal() and int(size) > 1:
        text = (
            f"this process is rank {rank} of a run of {size}: "
            "a launch starts in a notebook or script, not inside a worker"
        )
        problems.append(ValueError(text))


def _look_at_machine(
    problems: Problems,
    options: Options,
    requested: Engine | None,
    variables: Mapping[str, str],
    environment: Mapping[str, str],
) -> Machine:
    """Find out what the processes compute on: `variables` are this process's, `environment` the launch's."""
    try:
        use_cpu = bool(environ.flag_in({**variables, **environment}, "ACCELERATE_USE_CPU"))
        has_tpu = tpu.is_here(environment)
        kind = requested.device_kind if requested is not None else None
        ignores_mode = requested is not None and "tpu_mode" in requested.refuses
        shards = options["tpu_mode"] == "spmd" and not ignores_mode
        if kind is None:
            kind = devices.XLA if shards else devices.best(use_cpu, has_tpu, environment)
        missing: list[str] = []
        is_elsewhere = not requested.on_this_node if requested else options["hosts"] or options["slurm"]
        asks_for_xla = requested is None and has_tpu and not devices.find_requested(environment)
        if use_cpu or is_elsewhere:
            pass  # no device of this machine is needed
        elif kind is devices.XLA or asks_for_xla:
            missing = xla_runtime.find_missing(environment)
        elif absence := devices.find_absence(kind, environment):
            missing = [absence]
    except ValueError as error:  # the value of a variable is not legal
        problems.append(error)
        return Machine(has_tpu=False, kind=devices.CPU)
    if use_cpu and kind is devices.XLA:
        missing = ["ACCELERATE_USE_CPU is set, and XLA devices were asked for: unset it, or do not ask"]
    problems += map(ValueError, missing)
    return Machine(has_tpu, kind, is_usable=not missing)


def _find_requested_engine(problems: Problems, engine: Any) -> Engine | None:
    """Return the engine that the user asked for, by its name or as an object; None for `auto` or after a problem."""
    if isinstance(engine, Engine):
        return engine
    if not isinstance(engine, str):
        problems.append(TypeError(f"engine={engine!r}: the name of an engine is needed, or an Engine"))
    elif engine != base.AUTO:
        try:
            return base.find(engine)
        except ValueError as error:
            problems.append(error)
    return None


def _find_implied_engine(options: Options, wrong: Collection[str]) -> Any:
    """Return the engine as the user asked for it; the one that an option is for where it was not named."""
    if options["engine"] == base.AUTO:
        for name, engine in arguments.IMPLIED.items():
            if options[name] and name not in wrong:
                return engine
    return options["engine"]


def _choose_engine(options: Options, machine: Machine, needs_workers: bool) -> str:
    """Return the name of the engine to use, if the user did not ask for one."""
    if machine.kind is not devices.XLA:
        return "local" if needs_workers else "inprocess"
    if options["tpu_mode"] == "spmd":
        is_usable = not xla_runtime.is_started() or xla_runtime.is_sharding()
    else:
        is_usable = tpu.chips() == 1  # with several chips this process would take all of them
    return "inprocess" if is_usable and not needs_workers else "xla"


# -- how many processes, and on how many nodes


def _resolve_nodes(
    problems: Problems, options: Options, wrong: Collection[str], requested: Engine | None
) -> Rendezvous:
    """Return where the nodes meet; an engine that starts the ranks of all nodes says so itself, but for the port."""
    defaults = arguments.defaults()
    used = [name for name in _NODE_OPTIONS if options[name] != defaults[name]]
    if not used:
        return Rendezvous()
    refuses = {} if requested is None or requested.on_this_node else requested.refuses
    drives_nodes = requested is not None and requested.drives_nodes
    if drives_nodes and ":" in str(options["num_nodes"]):  # which implies how the nodes meet
        text = f"num_nodes={options['num_nodes']!r}: this engine needs a number, not a range"
        problems.append(ValueError(text))
        return Rendezvous()
    if requested is not None and (drives_nodes or "num_nodes" in refuses):
        taken = {*wrong, "use_port", "secret"}
        taken |= {"num_nodes"} if drives_nodes else {"rdzv_conf"} - refuses.keys()
        if name := next((name for name in used if name not in taken), None):
            reason = refuses.get(
                name, refuses.get("num_nodes", "it starts the ranks of all nodes, leave it out")
            )
            problems.append(ValueError(f"{name}={options[name]!r} with engine={requested.name!r}: {reason}"))
            return Rendezvous()
    if not drives_nodes:
        rendezvous, found = node_options.resolve(options, wrong)
        problems += found
        return rendezvous
    return Rendezvous(port=0 if "use_port" in wrong else parse_port(options["use_port"]) or 0)


def _check_processes(
    problems: Problems, options: Options, machine: Machine, requested: Engine | None
) -> None:
    """Check that this machine has a device for each process, if its devices can be counted."""
    number = options["num_processes"]
    is_elsewhere = requested is not None and not requested.on_this_node
    if number is None or machine.kind is devices.CPU or is_elsewhere or not machine.is_usable:
        return
    if number > (present := _count_devices(options, machine, requested)):
        problems.append(ValueError(devices.too_few(number, machine.kind, present, options["environment"])))


def _count_processes(problems: Problems, options: Options, machine: Machine, requested: Engine | None) -> int:
    """Return how many processes are to run."""
    if options["num_processes"] is not None:
        return int(options["num_processes"])
    try:
        return _count_devices(options, machine, requested)
    except LaunchError as error:  # for example because the engine's cluster does not answer
        problems += map(ValueError, str(error).splitlines())
        return 0


def _count_devices(options: Options, machine: Machine, requested: Engine | None) -> int:
    if requested is None:  # that of XLA counts one process where torch_xla computes on the CPU
        requested = base.find("xla" if machine.kind is devices.XLA else "local")
    return requested.count(options, machine.kind)


def _needs_workers(
    request: LaunchRequest,
    options: Options,
    rendezvous: Rendezvous,
    environment: Mapping[str, str],
    count: int,
) -> bool:
    """Return whether workers have to run the function. Libraries that shard need a worker even for one rank."""
    return (
        count > 1
        or rendezvous.num_nodes > 1
        or rendezvous.min_nodes > 0
        or any(name in environment and environ.flag_in(environment, name) for name in _LIBRARIES)
        or not options["block"]
        or options["detach"]
        or request.serve is not None
        or options["log_dir"] is not None
        or options["on_hang"] == "raise"
    )


# -- the function


def _check_function(
    problems: Problems, function: Any, args: Any, kwargs: Mapping[str, Any] | None = None
) -> None:
    if not isinstance(args, (tuple, list)):
        problems.append(
            TypeError(f"args={args!r}: a tuple is needed, for one argument write args=({args!r},)")
        )
    if not callable(function):
        hint = ": pass the function itself, without calling it" if function is None else ""
        problems.append(TypeError(f"function={function!r} is not callable{hint}"))
    elif inspect.isgeneratorfunction(function):
        text = (
            f"function={_get_name(function)} has a yield in it: calling such a function runs nothing of it; return a "
            "list, or launch a function that goes through what it yields"
        )
        problems.append(TypeError(text))
    elif inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        text = (
            f"function={_get_name(function)} is async: wrap it with asyncio.run in a plain function, and for a single "
            "process add engine='local': a notebook's own process has a running loop"
        )
        problems.append(TypeError(text))
    elif isinstance(args, (tuple, list)):
        _check_signature(problems, function, tuple(args), kwargs or {})


def _check_signature(
    problems: Problems, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some built-in functions have no signature
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        text = f"args has {len(args)} values, but the call would be {_get_name(function)}{signature}: {error}"
        problems.append(TypeError(text))


def _get_name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__


# -- arguments that depend on each other


def _check_libraries(
    problems: Problems, options: Options, environment: Mapping[str, str], *, here: bool
) -> None:
    """Find what would stop every worker: a library that is not installed, or a config that DeepSpeed refuses."""
    precision = str(options["mixed_precision"]).lower()
    if precision == "fp8" and not probes.is_available("torchao"):
        text = "mixed_precision='fp8': torchao computes in it, which is not installed: pip install torchao"
        problems.append(ValueError(text))
    if "ACCELERATE_USE_DEEPSPEED" not in environment:
        return
    from ..deepspeed import resolve

    problems += map(ValueError, resolve.check_variables(environment, precision, here=here))


def _check_world(problems: Problems, job: Job) -> None:
    """Check what depends on the number of ranks."""
    world = job.local_world_size * job.rendezvous.num_nodes
    if not isinstance(job.output, str) and any(int(rank) >= world for rank in job.output):
        text = f"output={job.output!r}: the ranks of this run are 0 to {world - 1}"
        problems.append(ValueError(text))
    if "ACCELERATE_USE_PARALLELISM_CONFIG" in job.environment and not job.rendezvous.is_elastic:
        from .. import parallelism

        problems += map(ValueError, parallelism.check_variables(job.environment, world))


def _check_options(
    problems: Problems, options: Options, wrong: Collection[str], engine: Engine | None
) -> None:
    """Find arguments that the engine does not support; `wrong` has those that are wrong by themselves."""
    if engine is None:  # it is chosen later
        return
    defaults, known_options = arguments.defaults(), arguments.options()
    not_here = ("num_processes", "num_nodes", "rdzv_conf", *wrong)  # other functions check these
    for name, reason in engine.refuses.items():
        if name not in not_here and options[name] != defaults[name]:
            what = name if name == "secret" else f"{name}={options[name]!r}"  # a secret is shown nowhere
            problems.append(ValueError(f"{what} with engine={engine.name!r}: {reason}"))
    for name in ("hosts", "python", "slurm", "detach"):
        engines = known_options[name].row.engines
        if options[name] and name not in wrong and engine.name not in engines:
            known = " and ".join(f"engine={each!r}" for each in engines)
            text = f"{name}={options[name]!r} with engine={engine.name!r}: it is for {known}"
            problems.append(ValueError(text))
    if "start_method" not in wrong and options["start_method"] not in ("auto", *engine.start_methods):
        known = ", ".join(map(repr, ("auto", *engine.start_methods)))
        text = f"start_method={options['start_method']!r} with engine={engine.name!r}: it supports {known}"
        problems.append(ValueError(text))


def _check_engine(problems: Problems, job: Job, engine: Engine) -> None:
    """Find out whether the engine can run so many ranks, and other reasons why it cannot run the job."""
    used = {
        "num_processes": (job.options["num_processes"], job.local_world_size > 1),
        "num_nodes": (job.options["num_nodes"], job.rendezvous.num_nodes > 1 or job.rendezvous.min_nodes > 0),
    }
    for name, (value, differs) in used.items():
        if differs and name in engine.refuses:
            text = f"{name}={value!r} with engine={engine.name!r}: {engine.refuses[name]}"
            problems.append(ValueError(text))
    problems += map(ValueError, engine.problems(job))


# -- the variables of the workers


def _make_worker_environment(job: Job, engine: Engine) -> dict[str, str]:
    """Return the variables that the workers get besides those of this process."""
    defaults = arguments.defaults()
    texts = {**job.environment, "ACCELERATE_MIXED_PRECISION": job.mixed_precision}
    if any(job.options[name] != defaults[name] for name in arguments.variable_names()):
        texts = {**job.environment, **arguments.variables(job.options), **texts}
    if job.distributed and engine.on_this_node and job.device_kind is devices.CPU:
        texts["ACCELERATE_USE_CPU"] = "true"  # without it workers that use Accelerate would each train alone
    if job.device_kind is devices.XLA:
        texts = {**xla_runtime.make_variables(job.tpu_mode), **texts}
    return texts
