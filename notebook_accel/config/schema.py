"""LaunchConfig: every option of a launch, checked once."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from .option import Option, Section, as_text, option, options_of, spelled
from .sections import (
    DeepSpeedConfig,
    DynamoConfig,
    FP8Config,
    FSDPConfig,
    MegatronConfig,
    MPIConfig,
    ParallelismSizes,
)

_TPU = {"distributed_type": ("XLA",)}

DistributedKind = Literal[
    "NO",
    "MULTI_CPU",
    "MULTI_GPU",
    "MULTI_XPU",
    "MULTI_NPU",
    "MULTI_MLU",
    "MULTI_SDAA",
    "MULTI_MUSA",
    "MULTI_HPU",
    "MULTI_NEURON",
    "DEEPSPEED",
    "FSDP",
    "XLA",
    "MEGATRON_LM",
]


class LaunchConfig(Section):
    """What to start, on what, and how models are trained there.

    Frozen; `with_options` makes others. The names are those of Accelerate's config
    files; what those do not have is left out of files where it has its default.

    Raises:
        ConfigError: lists everything that is wrong.
    """

    compute_environment: Annotated[Literal["LOCAL_MACHINE", "AMAZON_SAGEMAKER"], spelled()] = option(
        "LOCAL_MACHINE", "Where runs take place.", flag=None, expert=True
    )
    distributed_type: Annotated[DistributedKind, spelled(tpu="XLA", false="NO", mps="NO")] = option(
        "NO",
        "How processes share the work: one process, a process for each device, or a library that shards.",
        flag=None,
    )
    use_cpu: bool = option(
        False, "Leave accelerators alone and train on CPUs.", flag="cpu", env="ACCELERATE_USE_CPU"
    )
    num_processes: int | None = option(
        None, "Processes on all nodes together; by default one for each device found.", ge=1
    )
    num_machines: int = option(1, "Number of nodes.", ge=1)
    machine_rank: int = option(
        0, "Rank of this node, 0 for the one the others meet at.", ge=0, when={"num_machines": (">1",)}
    )
    main_process_ip: str | None = option(
        None, "Address of the node of rank 0.", when={"num_machines": (">1",)}
    )
    main_process_port: int | None = option(
        None,
        "Port at which processes meet; by default a free one on one node, 29500 on several.",
        ge=0,
        le=65535,
    )
    rdzv_backend: Annotated[Literal["static", "c10d"], BeforeValidator(lambda value: value or "static")] = (
        option("static", "How nodes find each other.", when={"num_machines": (">1",)})
    )
    same_network: bool = option(
        True, "All nodes are in one local network.", when={"num_machines": (">1",)}, expert=True
    )
    gpu_ids: Annotated[
        str | None, BeforeValidator(lambda value: str(value) if isinstance(value, int) else value)
    ] = option(
        None,
        "Devices to use on this node, such as 0,1; `all` for all.",
        when={"use_cpu": (False,)},
        pattern=r"^\s*(all|\d+(\s*,\s*\d+)*)\s*$",
    )
    mixed_precision: Annotated[
        Literal["no", "fp16", "bf16", "fp8"], BeforeValidator(lambda value: _precision(value))
    ] = option("no", "Number format of most computations.", env="ACCELERATE_MIXED_PRECISION")
    gradient_accumulation_steps: int = option(
        1, "Batches for each optimizer step.", ge=1, env="ACCELERATE_GRADIENT_ACCUMULATION_STEPS", file=False
    )
    dynamo_config: DynamoConfig = DynamoConfig()
    fsdp_config: FSDPConfig = FSDPConfig()
    deepspeed_config: DeepSpeedConfig = DeepSpeedConfig()
    fp8_config: FP8Config = FP8Config()
    use_parallelism_config: bool = option(
        False, "Combine several kinds of parallelism.", env="ACCELERATE_USE_PARALLELISM_CONFIG", expert=True
    )
    parallelism_config: ParallelismSizes = ParallelismSizes()
    megatron_lm_config: MegatronConfig = MegatronConfig()
    mpirun_config: MPIConfig = MPIConfig()
    num_cpu_threads_per_process: int | None = option(
        None, "Threads of each process's CPU kernels.", ge=1, env="OMP_NUM_THREADS"
    )
    enable_cpu_affinity: bool = option(
        False, "Keep each process on the cores near its GPU.", env="ACCELERATE_CPU_AFFINITY", expert=True
    )
    max_restarts: int = option(0, "Restarts of the run after a failure.", ge=0, file=False)
    monitor_interval: float = option(
        0.1, "Seconds between two looks at the processes.", gt=0, file=False, expert=True
    )
    rdzv_conf: str = option(
        "",
        "More about how nodes meet: key=value,key=value.",
        file=False,
        expert=True,
        pattern=r"^$|^\w+=[^,]*(,\w+=[^,]*)*$",
    )
    log_dir: str | None = option(None, "Folder for the output of each process.", file=False, expert=True)
    tee: str = option(
        "0", "Which output goes to the log folder and the terminal: 3 for all.", file=False, expert=True
    )
    role: str = option("default", "Name of the processes in torch elastic's logs.", file=False, expert=True)
    debug: bool = option(False, "Check every collective's inputs on all ranks.", env="ACCELERATE_DEBUG_MODE")
    downcast_bf16: Annotated[
        bool, BeforeValidator(lambda value: False if value in ("no", "", None) else value)
    ] = option(False, "On TPU, bfloat16 for double precision too.", when=_TPU, env="XLA_DOWNCAST_BF16")
    main_training_function: str = option(
        "main", "Function of the script that each TPU process calls.", when=_TPU, pattern=r"^[A-Za-z_]\w*$"
    )
    tpu_name: str | None = option(None, "Name of the TPU.", when=_TPU, flag=None)
    tpu_zone: str | None = option(None, "Zone of the TPU.", when=_TPU, flag=None)
    tpu_use_cluster: bool = option(False, "Use a TPU pod.", when=_TPU, flag="tpu_cluster", expert=True)
    tpu_use_sudo: bool = option(False, "Run as root on the pod.", when=_TPU, expert=True)
    tpu_vm: tuple[str, ...] = option((), "Machines of the pod.", when=_TPU, flag="vm", expert=True)
    tpu_env: tuple[str, ...] = option(
        (), "Variables set on the pod: name=value.", when=_TPU, flag="env", expert=True
    )
    command_file: str | None = option(
        None, "File of commands to run on the pod first.", when=_TPU, flag=None, expert=True
    )
    commands: tuple[str, ...] = option(
        (), "Commands to run on the pod first.", when=_TPU, flag=None, expert=True
    )
    environment: Annotated[dict[str, str], BeforeValidator(lambda value: _variables(value))] = option(
        {}, "More environment variables of the processes.", flag=None, expert=True
    )

    @model_validator(mode="wrap")
    @classmethod
    def _in_sentences(cls, values: Any, make: Callable[[Any], LaunchConfig]) -> LaunchConfig:
        from . import problems

        return problems.raised_by(make, values) if isinstance(values, Mapping) else make(values)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> LaunchConfig:
        """Return the config in a file; ConfigError lists all that is wrong with it, with its lines."""
        from . import file

        return file.read(path).config

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the config to a file, whole or not at all; a file that is there keeps its comments."""
        from . import file

        return file.write(self, path)

    def with_options(self, **options: Any) -> LaunchConfig:
        """Return another config with these options changed; ConfigError for wrong ones."""
        from . import problems

        return problems.check({**self.model_dump(exclude_unset=True), **options})

    def misfits(self) -> Iterator[str]:
        """Yield a sentence for options that do not go together, which begins with the name of one."""
        if self.num_processes is not None and self.num_processes % self.num_machines:
            yield f"num_processes {self.num_processes} is no multiple of num_machines {self.num_machines}"
        if self.machine_rank >= self.num_machines:
            yield f"machine_rank {self.machine_rank} >= num_machines {self.num_machines}: ranks count from 0"


def _variables(value: Any) -> Any:
    """Files hold numbers where variables have text; what no process can be given is refused before one starts."""
    if not isinstance(value, Mapping):
        return value
    for name, text in value.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise ValueError(f"has {name!r}, which is no name of a variable")
        if not isinstance(text, (str, bool, int, float)) or "\0" in str(text):
            raise ValueError(f"has {text!r} for {name}, which is no text")
    return {name: text if isinstance(text, str) else as_text(text) for name, text in value.items()}


def _precision(value: Any) -> Any:
    """YAML reads an unquoted `no` as False."""
    if isinstance(value, str):
        return value.lower()
    return "no" if value is False or value is None else value


@functools.cache
def table() -> tuple[Option, ...]:
    """Return every option, in the order of the schema."""
    return tuple(options_of(LaunchConfig))


def section_title(option: Option) -> str:
    """Return what the section of an option is called: its docstring's first line; empty for an option of none."""
    if len(option.path) == 1:
        return ""
    section: Any = LaunchConfig.model_fields[option.path[0]].annotation
    return str(section.__doc__).partition("\n")[0].rstrip(".")


@functools.cache
def _by_name() -> dict[str, Option]:
    return {option.name: option for option in table()}


def matters(chosen: Option, values: Mapping[str, Any], but_within: str = "") -> bool:
    """Return True if an option has a meaning beside the values of others, by their names, but those of one section.

    It has none beside a value that has none itself.
    """
    rules = chosen.face.when.items()
    return all(
        _legal(values.get(name), legal) and matters(_by_name()[name], values, but_within)
        for name, legal in rules
        if name.partition(".")[0] != but_within
    )


def _legal(value: Any, legal: tuple[Any, ...]) -> bool:
    return any(_follows(value, rule) for rule in legal)


def _follows(value: Any, rule: Any) -> bool:
    """Return True for the value that a rule is, for any other than X where it is `!X`, for larger ones where `>1`."""
    if isinstance(rule, str) and rule.startswith("!"):
        return bool(value != rule[1:])
    if isinstance(rule, str) and rule.startswith(">"):
        return value is not None and bool(value > int(rule[1:]))
    return bool(value == rule)
