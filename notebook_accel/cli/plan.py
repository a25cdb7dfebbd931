"""What a launch will do: options of flags, file and defaults resolved, and checked against this machine."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .. import devices, environ, parallelism, probes
from ..config import argument_checks, arguments, export, file
from ..config import launch as by_config
from ..config.option import as_text
from ..config.schema import LaunchConfig, chosen_names, flat_values, has_effect, table
from ..errors import ConfigError, Problem
from ..launch.checks import addresses, xla_runtime
from ..launch.engines import base
from ..launch.request import LaunchRequest
from ..launch.script import Script
from . import flags
from .flags import PARADIGMS

_ON_DEVICES: Final = {
    kind.distributed_type: kind for kind in (devices.CUDA, devices.XPU, *devices.EXTENSIONS)
}
_WITH_RANKS: Final = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA")
"""Kinds whose single process is a rank too: libraries that shard expect it, and XLA processes find their chip."""
_MODULES: Final = {
    "DEEPSPEED": "deepspeed",
    "MEGATRON_LM": "megatron",
    "AO": "torchao",
    "TE": "transformer_engine",
    "MSAMP": "msamp",
}
_PRECISION: Final = "ACCELERATE_MIXED_PRECISION"
_PORT: Final = 29500  # where several nodes meet, unless they name another port
_AUTO: Final = "auto"
_ENGINES_HERE: Final = (_AUTO, "inprocess", "local", "xla")
_PODS: Final = "tpu_use_cluster: TPU pods are not supported"
FROM_MACHINE: Final = "this machine"
"""The source of what this machine decides, see `Plan.sources`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A launch, ready to start.

    Attributes:
        config: all options, with what this machine decides filled in.
        sources: where each option's value is from, by name: a flag, the file, this machine, or the default.
        environment: variables that the options set in the processes.
        derived: variables for processes that share this node.
        doubts: what this machine lacks for it.
    """

    config: LaunchConfig
    sources: Mapping[str, str]
    environment: Mapping[str, str]
    derived: Mapping[str, str]
    doubts: tuple[Problem, ...]

    @property
    def local_world_size(self) -> int:
        """Processes on this node."""
        return _count_local(self.config)

    def make_request(self, script: Script) -> LaunchRequest:
        """Return what a launch of a script from a cell would ask for with the same options.

        Args:
            script: what to run.
        """
        known, config = arguments.options(), self.config
        values = {
            name: value
            for name, value in by_config.arguments(config, ()).values.items()
            if known[name].row.launches != "notebooks"
        }
        if config.num_machines > 1 and not config.rdzv_endpoint:
            values["use_port"] = config.main_process_port or _PORT
        values["mixed_precision"] = self.environment.get(_PRECISION) or environ.get(_PRECISION) or "no"
        if script.kind == "program":
            values["hang_timeout"] = None  # it cannot be asked where it is
        environment = {**self.derived, "ROLE_NAME": config.role, **self.environment}
        values |= {"returns": "none", "environment": environment}
        return LaunchRequest(function=script, options=values, quiet=True)

    @property
    def is_distributed(self) -> bool:
        """Whether processes have to meet, or are watched: what a single one does not need takes this one's place."""
        config = self.config
        is_watched = config.on_hang == "raise" or config.log_dir is not None
        has_workers = config.engine not in (_AUTO, "inprocess") or config.distributed_type in _WITH_RANKS
        return (config.num_processes or 1) > 1 or has_workers or is_watched


def resolve(values: Mapping[str, Any], config_file: str | None) -> tuple[Plan, list[str]]:
    """Return the plan that flags and file make.

    Args:
        values: flags by the names of their options, as texts; None where one was not given.
        config_file: path of the config; None is the default one, where there is one.

    Returns:
        The plan, and remarks on what it lacks or leaves out.

    Raises:
        ConfigError: lists everything that is wrong on any machine.
    """
    wrong = _find_unsupported(values)
    path = config_file or (file.default_path() if file.default_path().exists() else None)
    base, from_file, remarks = LaunchConfig(), frozenset[str](), list[str]()
    try:
        if path is not None:
            base, from_file, remarks = _read(path)
        config = flags.apply(_set_paradigm(base, values), values)
    except ConfigError as error:
        raise ConfigError([*wrong, *error.problems]) from None
    given = _list_names(flags.parse(values)) | ({"distributed_type"} if _list_paradigms(values) else set())
    config, idle = _drop_idle(config, given)
    remarks += [f"{name} of {path} {text}" for name, text in idle.items()]
    wrong += [each for each in _find_contradictions(config) if each.text not in {one.text for one in wrong}]
    if wrong:
        raise ConfigError(wrong)
    complete = _complete(config, is_given=values.get("use_cpu") is not None)
    before, after = flat_values(config), flat_values(complete)
    sources = dict.fromkeys(after, "default")
    sources |= dict.fromkeys(from_file - idle.keys(), f"{path}")
    sources |= dict.fromkeys(given, "flag")
    sources |= {name: FROM_MACHINE for name in after if after[name] != before[name]}
    chosen = {name for name, source in sources.items() if source != "default"}
    plan = Plan(
        config=complete,
        sources=sources,
        environment=export.environment(complete, chosen),
        derived=_derive_environment(complete),
        doubts=(*_find_misfits(complete), *_check_port(complete)),
    )
    if config.num_processes and (
        texts := parallelism.check_variables(plan.environment, config.num_processes)
    ):
        raise ConfigError([Problem(name="parallelism_config", text=text) for text in texts])
    return plan, [*remarks, *_find_idle_flags(after, given), *_find_lacking(complete, path)]


def _drop_idle(config: LaunchConfig, given: Collection[str]) -> tuple[LaunchConfig, dict[str, str]]:
    """Return the config without what its file has for other engines, and by option why each of that is left out."""
    flat, options = flat_values(config), arguments.of_configs()
    chosen = {
        name: flat[option.name] for name, option in options.items() if flat[option.name] != option.default
    }
    idle = by_config.find_idle(chosen, {name for name, option in options.items() if option.name in given})
    changes = {options[name].name: options[name].default for name in idle}
    if "num_nodes" in idle:
        changes["min_machines"] = None
    return config.model_copy(update=changes), {options[name].name: text for name, text in idle.items()}


def _find_lacking(config: LaunchConfig, config_file: str | Path | None) -> list[str]:
    """Return a remark for each library and file that an option names and this machine lacks."""
    needed = {f"distributed_type {config.distributed_type}": _MODULES.get(config.distributed_type)}
    if config.mixed_precision == "fp8":
        backend = config.fp8_config.backend
        needed[f"fp8_config.backend {backend}"] = _MODULES[backend]
    remarks = [
        f"{option}: {module} is not installed here"
        for option, module in needed.items()
        if module and not probes.is_available(module)
    ]
    name = config.deepspeed_config.deepspeed_config_file
    if config.distributed_type == "DEEPSPEED" and name and not Path(name).exists():
        beside = Path(config_file).with_name(name) if config_file else None
        hint = f", did you mean {beside}?" if beside and beside.exists() else f" in {Path.cwd()}"
        remarks.append(f"deepspeed_config_file {name} does not exist{hint}")
    return remarks


def _find_idle_flags(values: Mapping[str, Any], given: set[str]) -> list[str]:
    """Return a remark for each flag of a library or feature that is not used."""
    remarks = []
    for option in flags.options():
        if option.name not in given or len(option.path) == 1 or has_effect(option, values):
            continue
        unmet = [f"{name.rpartition('.')[2]} is {as_text(values[name])}" for name in option.face.when]
        remarks.append(f"--{option.face.flag} has no effect: {', '.join(unmet)}")
    return remarks


def _read(path: str | Path) -> tuple[LaunchConfig, frozenset[str], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = file.read(path).config
    return config, chosen_names(config), [str(warning.message) for warning in caught]


def _list_names(nested: Mapping[str, Any]) -> set[str]:
    return {
        option.name
        for option in table()
        if option.path[0] in nested and (len(option.path) == 1 or option.path[1] in nested[option.path[0]])
    }


def _list_paradigms(values: Mapping[str, Any]) -> list[str]:
    return [flag for flag in PARADIGMS if values.get(flag)]


def _set_paradigm(config: LaunchConfig, values: Mapping[str, Any]) -> LaunchConfig:
    named = _list_paradigms(values)
    if not named:
        return config
    kind = PARADIGMS[named[0]][0]
    if kind == "MULTI_GPU" and devices.best() is devices.XPU:
        kind = "MULTI_XPU"
    return config.model_copy(update={"distributed_type": kind})


def _find_unsupported(values: Mapping[str, Any]) -> list[Problem]:
    """Return what is wrong with flags that a config has no option for."""
    found = []
    named = [f"--{flag}" for flag in _list_paradigms(values)]
    if len(named) > 1:
        found.append(f"{' and '.join(named)} exclude each other: give one of them")
    if values.get("use_cpu") == "true" and (values.get("multi_gpu") or values.get("tpu")):
        found.append(f"--cpu and --{'multi_gpu' if values['multi_gpu'] else 'tpu'} exclude each other")
    if values.get("tpu_use_cluster") == "true":
        found.append(_PODS)
    given = [f"--{name}" for name in ("aws_access_key_id", "aws_secret_access_key") if values.get(name)]
    if given:
        found.append(f"{' and '.join(given)}: SageMaker is not supported, runs are launched on this machine")
    return [Problem(name="", text=text) for text in found] + _check_engine(values.get("engine"))


def _check_engine(name: str | None) -> list[Problem]:
    """Return why no engine has a name: launches say so too, but only of options that are right otherwise."""
    if name not in (None, _AUTO):
        try:
            base.check_name(argument_checks.parse_engine(name))
        except ValueError as error:
            return [Problem(name="engine", text=str(error))]
    return []


def _find_contradictions(config: LaunchConfig) -> list[Problem]:
    """Return why options cannot be launched on any machine."""
    found: dict[str, str] = {}
    if config.compute_environment != "LOCAL_MACHINE":
        found["compute_environment"] = (
            f"compute_environment {config.compute_environment}: runs are launched on this machine only"
        )
    if config.tpu_use_cluster:
        found["tpu_use_cluster"] = _PODS
    if config.mpirun_config.mpirun_hostfile:
        found["mpirun_config.mpirun_hostfile"] = (
            "mpirun_hostfile: mpirun is not used; start the command on each node, with --num_machines, "
            "--machine_rank and --main_process_ip"
        )
    drives_nodes = config.engine in ("slurm", "ssh") or bool(config.slurm or config.hosts)
    if config.num_machines > 1 and not (config.main_process_ip or config.rdzv_endpoint or drives_nodes):
        found["main_process_ip"] = (
            f"num_machines {config.num_machines} needs main_process_ip: the address of the node of rank 0"
        )
    return [Problem(name=name, text=text) for name, text in found.items()] + _check_engine(config.engine)


def _complete(config: LaunchConfig, *, is_given: bool) -> LaunchConfig:
    """Return the config with what this machine decides: processes, their kind, and whether they use the CPU."""
    if config.engine == _AUTO and (config.hosts or config.slurm):
        config = config.model_copy(update={"engine": "ssh" if config.hosts else "slurm"})
    if _is_elsewhere(config):
        return config
    kind = _find_kind(config)
    ids = config.gpu_ids.split(",") if config.gpu_ids not in (None, "all") else []
    local = (
        1 if config.tpu_mode == "spmd" else max(1, len(ids) or devices.count_usable(kind, config.environment))
    )
    total = config.num_processes or local * config.num_machines
    if total > 1 and kind.backend is None:
        kind = devices.CPU
    paradigm: str = config.distributed_type
    if config.use_cpu and paradigm.startswith("MULTI_"):
        paradigm = "NO"
    if paradigm == "NO" and total > 1:
        paradigm = kind.distributed_type
    use_cpu = config.use_cpu
    if kind is devices.CPU and paradigm in ("NO", "MULTI_CPU") and not is_given:
        use_cpu = True
    changes = {"num_processes": total, "distributed_type": paradigm, "use_cpu": use_cpu}
    if paradigm == "XLA" and config.engine == _AUTO:
        changes["engine"] = "xla"
    return config.model_copy(update=changes)


def _is_elsewhere(config: LaunchConfig) -> bool:
    """Return whether the processes start on a cluster: what this machine has does not count then."""
    if config.engine in _ENGINES_HERE:
        return False
    try:
        return not base.find(config.engine).on_this_node
    except ValueError:  # preflight says why it cannot be had
        return False


def _find_kind(config: LaunchConfig) -> devices.DeviceKind:
    """Return what the processes run on."""
    if config.use_cpu or config.distributed_type == "MULTI_CPU":
        return devices.CPU
    return devices.XLA if config.distributed_type == "XLA" else devices.best(environment=config.environment)


def _derive_environment(config: LaunchConfig) -> dict[str, str]:
    """Return each process's share of the cores, and gloo's interface, unless the user chose them."""
    if (config.num_processes or 1) == 1 or _is_elsewhere(config):
        return {}
    texts = {"OMP_NUM_THREADS": str(devices.share_of_cores(_count_local(config)))}
    loopback = addresses.find_loopback_interface()
    if loopback and config.num_machines == 1:
        texts["GLOO_SOCKET_IFNAME"] = loopback
    said = {name for name, text in environ.snapshot().items() if text} | config.environment.keys()
    if config.num_cpu_threads_per_process is not None:
        said.add("OMP_NUM_THREADS")
    return {name: text for name, text in texts.items() if name not in said}


def _count_local(config: LaunchConfig) -> int:
    return (config.num_processes or 1) // config.num_machines


def _find_misfits(config: LaunchConfig) -> list[Problem]:
    """Return what this machine lacks for the config."""
    kind, local = config.distributed_type, _count_local(config)
    label = f"distributed_type {kind}"
    if kind == "XLA":
        texts = xla_runtime.find_missing(config.environment)
        return [Problem(name="distributed_type", text=f"{label}: {text}") for text in texts]
    if config.use_cpu or _is_elsewhere(config):
        return []
    here = devices.best(environment=config.environment)
    if absence := devices.find_absence(here, config.environment):
        return [Problem(name="environment", text=absence)]
    if kind == "NO" and local == 1 and not config.gpu_ids:
        return []
    wanted = here if here.distributed_type == kind else _ON_DEVICES.get(kind, here)
    number = 0 if wanted is devices.CPU else wanted.counter()
    if number == 0:
        name = "GPU" if wanted is devices.CPU else wanted.label
        text = f"{label}: this machine has no {name}: launch where there is one, or add --cpu to use CPUs"
        return [Problem(name="distributed_type", text=text)]
    usable = devices.count_usable(wanted, config.environment)
    if config.gpu_ids in (None, "all") and local > usable < number:
        text = devices.too_few(config.num_processes or local, wanted, usable, config.environment)
        return [Problem(name="num_processes", text=text)]
    return _check_devices(config, wanted, number, local)


def _check_devices(config: LaunchConfig, kind: devices.DeviceKind, number: int, local: int) -> list[Problem]:
    has = f"this machine has {number} {kind.label if number == 1 else kind.plural}"
    ids = [int(part) for part in config.gpu_ids.split(",")] if config.gpu_ids not in (None, "all") else []
    absent = [part for part in ids if part >= number]
    if absent and not (kind.visible and environ.get(kind.visible)):
        return [Problem(name="gpu_ids", text=f"gpu_ids {config.gpu_ids}: {has}, counted from 0")]
    usable = len(ids) or number
    if local > usable:
        chosen = f"gpu_ids {config.gpu_ids} are {usable}" if ids else has
        text = (
            f"num_processes {config.num_processes}: {chosen}: give --num_processes "
            f"{usable * config.num_machines}, or add --cpu to use CPUs"
        )
        return [Problem(name="num_processes", text=text)]
    return []


def _check_port(config: LaunchConfig) -> list[Problem]:
    port = config.main_process_port
    if not port or config.num_machines > 1 or (config.num_processes or 1) == 1:
        return []
    reason = addresses.find_listen_problem("127.0.0.1", port)
    if not reason:
        return []
    text = f"main_process_port {port} cannot be used ({reason}): leave it out, and a free one is taken"
    return [Problem(name="main_process_port", text=text)]
