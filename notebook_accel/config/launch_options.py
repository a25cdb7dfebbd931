"""The options of a launch, a row for each: what to start, where, and how it is watched. pydantic is not needed.

What a row says is all that an option needs: from it come the line of a file, the flag, the question, the field of the
form, the environment variable, the check, the argument of `notebook_launcher` and the line in docs/options.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from . import argument_checks as checks
from . import hosts as of_hosts
from . import readers
from . import slurm as of_slurm
from .option import Argument, Read, Rows, any_case, option

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
StartMethod: TypeAlias = Literal["auto", "fork", "fresh"]
Returns: TypeAlias = Literal["first", "all", "none"]
View: TypeAlias = Literal["auto", "widget", "text", "none"]
OnHang: TypeAlias = Literal["tell", "raise"]
TpuMode: TypeAlias = Literal["process", "spmd"]

_LOOPBACK = "127.0.0.1"
_TPU = {"distributed_type": ("XLA",)}
_NODES = {"num_machines": (">1",)}
_RANKS = r"^\s*(all|first|none|\d+(\s*,\s*\d+)*)\s*$"
_PAIRS = r"^$|^\w+=[^,]*(,\w+=[^,]*)*$"


def _per_node(total: int | None, values: Mapping[str, Any]) -> int | None:
    if total is None or values["engine"] == "slurm" or values["slurm"]:
        return total
    return total // int(values["num_machines"])


def _nodes(number: int, values: Mapping[str, Any]) -> int | str:
    least = values["min_machines"]
    return number if least is None else f"{least}:{number}"


def _backend(word: str, values: Mapping[str, Any]) -> str:
    """Return how nodes meet; those that join and leave do so by c10d."""
    return word if values["min_machines"] is None else "c10d"


def _pairs(text: str, values: Mapping[str, Any]) -> dict[str, Any] | None:
    parts = (part.partition("=") for part in text.split(",") if part)
    return {name: _number(value) for name, _, value in parts} or None


def _number(text: str) -> int | float | str:
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        return text


def _ranks(text: str, values: Mapping[str, Any]) -> str | list[int]:
    return text.strip() if text.strip().isalpha() else [int(rank) for rank in text.split(",")]


class SecretOptions(Rows):
    """Options that only an argument or a variable says: no config has them, so no file, flag, form or report does."""

    secret: str | None = option(
        None,
        "What nodes of a run prove to each other before anything that they say is believed; the same on all nodes. A "
        "`Path` is that of a file that only you can read; `NOTEBOOK_ACCEL_SECRET_FILE` names one too. Without a secret "
        "nodes exchange plain data only.",
        when=_NODES,
        env="",
        flag=None,
        file=False,
        engines=("local",),
        argument=Argument(check=checks.check_secret, variable="NOTEBOOK_ACCEL_SECRET"),
    )


class LaunchOptions(Rows):
    """Every option that belongs to no section, in the order of files and forms."""

    compute_environment: Annotated[Literal["LOCAL_MACHINE", "AMAZON_SAGEMAKER"], any_case()] = option(
        "LOCAL_MACHINE", "Where runs take place.", flag=None, expert=True
    )
    distributed_type: Annotated[DistributedKind, any_case(tpu="XLA", false="NO", mps="NO")] = option(
        "NO",
        "How processes share the work: one process, a process for each device, or a library that shards.",
        flag=None,
    )
    use_cpu: bool = option(
        False, "Leave accelerators alone and train on CPUs.", flag="cpu", env="ACCELERATE_USE_CPU"
    )
    num_processes: int | None = option(
        None,
        "Processes on all nodes together; by default one for each device found.",
        ge=1,
        argument=Argument(
            help="Processes on this node, under Ray, ssh and SLURM on all; by default one for each GPU or TPU chip, or "
            "1. A single process is the notebook's own.",
            convert=_per_node,
        ),
    )
    num_machines: int = option(
        1,
        "Number of nodes.",
        ge=1,
        argument=Argument(
            name="num_nodes",
            help="Number of nodes: each runs the same cell with its own `node_rank`. `1:4` is 1 to 4, which may join "
            "and leave.",
            convert=_nodes,
            check=checks.check_num_nodes,
        ),
    )
    min_machines: int | None = option(
        None,
        "Fewest nodes with which the run goes on: others may join and leave. By default all have to stay.",
        ge=1,
        when=_NODES,
        file=False,
        expert=True,
    )
    machine_rank: int = option(
        0,
        "Rank of this node, 0 for the one the others meet at.",
        ge=0,
        when=_NODES,
        argument=Argument(name="node_rank"),
    )
    main_process_ip: str | None = option(
        None,
        "Address of the node of rank 0.",
        when=_NODES,
        argument=Argument(
            name="master_addr",
            default=_LOOPBACK,
            convert=lambda address, values: address or _LOOPBACK,
            check=checks.check_host,
        ),
    )
    main_process_port: int | None = option(
        None,
        "Port at which processes meet; by default a free one on one node, 29500 on several.",
        ge=0,
        le=65535,
        argument=Argument(
            name="use_port",
            help="Port at which processes meet; by default a free one. Several nodes have to name one.",
            check=checks.check_port,
        ),
    )
    rdzv_backend: Annotated[Literal["static", "c10d"], Read(lambda value: value or "static")] = option(
        "static",
        "How nodes find each other; a range of nodes needs `c10d`, and implies it.",
        when=_NODES,
        argument=Argument(convert=_backend),
    )
    rdzv_endpoint: str = option(
        "",
        "Where nodes meet instead of at the address and port of rank 0, such as 10.0.0.1:29400.",
        when=_NODES,
        file=False,
        expert=True,
        pattern=r"^$|^\S+:\d+$",
        argument=Argument(),
    )
    rdzv_id: str = option(
        "none",
        "Name of the run, by which nodes that meet at one place know each other.",
        when=_NODES,
        file=False,
        expert=True,
        argument=Argument(),
    )
    rdzv_conf: str = option(
        "",
        "More about how nodes meet: key=value,key=value.",
        file=False,
        expert=True,
        pattern=_PAIRS,
        argument=Argument(
            help='Settings of how nodes meet, a dict; `{"join_timeout": 60}` waits 60 seconds for the others.',
            default=None,
            convert=_pairs,
            check=checks.check_rendezvous,
        ),
    )
    same_network: bool = option(True, "All nodes are in one local network.", when=_NODES, expert=True)
    gpu_ids: Annotated[str | None, Read(readers.join)] = option(
        None,
        "Devices to use on this node, such as 0,1; `all` for all.",
        when={"use_cpu": (False,)},
        pattern=r"^\s*(all|\d+(\s*,\s*\d+)*)\s*$",
    )
    mixed_precision: Annotated[Literal["no", "fp16", "bf16", "fp8"], Read(readers.read_precision)] = option(
        "no",
        "Number format of most computations.",
        env="ACCELERATE_MIXED_PRECISION",
        argument=Argument(
            help="Number format of most computations of an `Accelerator` in the workers; `fp8` needs torchao.",
            any_case=True,
        ),
    )
    gradient_accumulation_steps: int = option(
        1, "Batches for each optimizer step.", ge=1, env="ACCELERATE_GRADIENT_ACCUMULATION_STEPS", file=False
    )
    use_parallelism_config: bool = option(
        False, "Combine several kinds of parallelism.", env="ACCELERATE_USE_PARALLELISM_CONFIG", expert=True
    )
    num_cpu_threads_per_process: int | None = option(
        None, "Threads of each process's CPU kernels.", ge=1, env="OMP_NUM_THREADS"
    )
    enable_cpu_affinity: bool = option(
        False, "Keep each process on the cores near its GPU.", env="ACCELERATE_CPU_AFFINITY", expert=True
    )
    engine: Annotated[str, Read(checks.parse_engine)] = option(
        "auto",
        "What starts the processes: `inprocess` none, `local` processes of this machine, also where it "
        "is one node of several, `xla` one for each TPU chip, `ray` Ray on a cluster, `ssh` your ssh client on "
        "`hosts`, `slurm` a SLURM cluster, or what another package adds; `auto` is what the machine and the other "
        "options need.",
        file=False,
        expert=True,
        argument=Argument(check=checks.check_nothing),  # the table of engines checks it
    )
    address: str | None = option(
        None,
        "Where the cluster of the engine is: under Ray `auto`, `host:port` or `ray://host:port`.",
        when={"engine": ("!auto",)},
        file=False,
        expert=True,
        engines=("ray",),
        argument=Argument(variable="RAY_ADDRESS"),
    )
    hosts: Annotated[tuple[str, ...], Read(of_hosts.read_list)] = option(
        (),
        "The hosts of a launch by ssh, in the order of their ranks: gpu1, me@10.0.0.7, or gpu2:4 for four ranks; "
        "without a number a host has one for each GPU, or 1.",
        file=False,
        expert=True,
        engines=("ssh",),
        argument=Argument(
            default=None,
            convert=lambda hosts, values: list(hosts) or None,
            check=of_hosts.check_hosts,
        ),
    )
    python: str | None = option(
        None,
        "Path of the Python on the hosts or nodes; by default the path of the one that launches, else `python3` there.",
        file=False,
        expert=True,
        engines=("ssh", "slurm"),
        argument=Argument(
            help="Path of the Python on the hosts or nodes, under ssh also a dict of those by host; by default the "
            "path of the one that launches, else `python3` there.",
            check=of_hosts.check_python,
        ),
    )
    slurm: Annotated[tuple[str, ...], Read(of_slurm.read_pairs)] = option(
        (),
        "What a launch by SLURM asks for, as options of sbatch: partition=gpu time=02:00:00 gpus_per_node=4.",
        file=False,
        expert=True,
        engines=("slurm",),
        argument=Argument(
            help='What a launch by SLURM asks for, a dict of options of sbatch: `{"partition": "gpu", "time": '
            '"02:00:00", "gpus_per_node": 4}`.',
            default=None,
            convert=lambda pairs, values: of_slurm.parse_pairs(pairs) or None,
            check=of_slurm.check_slurm,
        ),
    )
    slurm_keep: float = option(
        120.0,
        "Seconds that a job's nodes stay for the next launch after a run; they cost meanwhile. 0 ends the job with the "
        "run.",
        ge=0,
        le=86_400,
        when={"engine": ("slurm",)},
        file=False,
        expert=True,
        engines=("slurm",),
        argument=Argument(check=checks.check_duration),
    )
    slurm_notice: float = option(
        120.0,
        "Seconds before a job's time limit at which `accelerator.should_stop` turns true.",
        ge=0,
        le=86_400,
        when={"engine": ("slurm",)},
        file=False,
        expert=True,
        engines=("slurm",),
        argument=Argument(check=checks.check_duration),
    )
    detach: bool = option(
        False,
        "The run goes on when the notebook ends; `notebook_accel.attach` shows it again.",
        launches="notebooks",
        when={"engine": ("local", "slurm", "ssh")},
        file=False,
        expert=True,
        engines=("local", "slurm", "ssh"),
        argument=Argument(),
    )
    name: str | None = option(
        None,
        "How the run is called where it is shown, and by `notebook_accel.attach`. None is the function's name.",
        launches="notebooks",
        file=False,
        expert=True,
        argument=Argument(check=checks.check_optional(checks.check_name)),
    )
    tpu_mode: TpuMode = option(
        "process",
        "How processes use TPU chips: `process` is one for each chip, `spmd` one that uses all.",
        when=_TPU,
        env="NOTEBOOK_ACCEL_TPU_MODE",
        file=False,
        expert=True,
        engines=("inprocess", "xla"),
        argument=Argument(),
    )
    start_method: Annotated[StartMethod, Read(checks.parse_start_method)] = option(
        "auto",
        "How processes start: `fork` copies the notebook's process, `fresh` starts new ones, `auto` forks where that "
        "is safe, never with several nodes.",
        launches="notebooks",
        file=False,
        expert=True,
        engines=("local", "xla"),
        argument=Argument(),
    )
    max_restarts: int = option(
        0,
        "Restarts of the run after a failure.",
        ge=0,
        le=1_000_000,
        file=False,
        engines=("local", "xla", "ray", "ssh", "slurm"),
        argument=Argument(
            help="How often all workers are started again after one failed on this node; nodes that come or go do not "
            "count."
        ),
    )
    monitor_interval: float = option(
        0.1,
        "Seconds between two looks at the other nodes.",
        gt=0,
        le=86_400,
        file=False,
        expert=True,
        argument=Argument(
            help="Seconds between two looks at the other nodes; the end of a worker is noticed at once.",
            check=checks.check_seconds,
        ),
    )
    hang_timeout: float = option(
        300.0,
        "Seconds without any news of any rank after which the launch says where each rank is; 0 is never.",
        ge=0,
        le=86_400,
        file=False,
        expert=True,
        argument=Argument(
            help="Seconds without any news of any rank after which the launch says where each rank is; None is never.",
            convert=lambda seconds, values: seconds or None,
            check=checks.check_patience,
        ),
    )
    on_hang: OnHang = option(
        "tell",
        "What happens at a hang: `tell` goes on waiting, `raise` ends the run, or starts its workers again where "
        "`max_restarts` allows.",
        file=False,
        expert=True,
        engines=("local", "xla", "ray", "ssh", "slurm"),
        argument=Argument(),
    )
    returns: Returns = option(
        "first",
        "What a launch returns: `first` the value of rank 0, `all` the list of every rank's, `none` nothing.",
        launches="notebooks",
        file=False,
        expert=True,
        argument=Argument(),
    )
    block: bool = option(
        True,
        "Wait for the end of the run; without, a launch returns a `Run` at once.",
        launches="notebooks",
        file=False,
        expert=True,
        engines=("local", "xla", "ray", "ssh", "slurm"),
        argument=Argument(),
    )
    view: View = option(
        "auto",
        "How a run is shown: `widget`, `text`, or `none`, which shows errors only; `auto` is widgets in a notebook and "
        "text elsewhere.",
        launches="notebooks",
        file=False,
        expert=True,
        argument=Argument(variable="NOTEBOOK_ACCEL_VIEW"),
    )
    output: Annotated[str, Read(readers.join)] = option(
        "all",
        "Ranks whose output is shown, such as 0,2; `all`, `first` and `none` are words for it.",
        file=False,
        expert=True,
        pattern=_RANKS,
        argument=Argument(
            help="Ranks whose output is shown: `all`, `first`, `none` or a collection of ranks.",
            convert=_ranks,
            check=checks.check_output,
        ),
    )
    log_line_prefix_template: Annotated[str | None, Read(readers.read_template)] = option(
        None,
        "Text before each line of output; `${rank}`, `${local_rank}` and `${role_name}` are filled in. By default "
        "`[0] ` and so on.",
        spaces=True,
        file=False,
        expert=True,
        argument=Argument(check=checks.check_template),
    )
    log_dir: str | None = option(
        None,
        "Folder for the output of each process.",
        file=False,
        expert=True,
        engines=("local", "xla", "ray", "ssh", "slurm"),
        argument=Argument(check=checks.check_folder),
    )
    tee: str = option(
        "0",
        "Has no effect: all output goes to the terminal, and to the log folder where there is one.",
        launches="scripts",
        file=False,
        expert=True,
    )
    role: str = option(
        "default",
        "Name of the processes in torch elastic's logs.",
        launches="scripts",
        file=False,
        expert=True,
    )
    debug: bool = option(False, "Check every collective's inputs on all ranks.", env="ACCELERATE_DEBUG_MODE")
    downcast_bf16: Annotated[bool, Read(lambda value: False if value in ("no", "", None) else value)] = (
        option(False, "On TPU, bfloat16 for double precision too.", when=_TPU, env="XLA_DOWNCAST_BF16")
    )
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
    as_accelerate: bool = option(
        False,
        "Let `import accelerate` give this package: libraries that use Accelerate run on it unchanged.",
        env="NOTEBOOK_ACCEL_AS_ACCELERATE",
        file=False,
        expert=True,
    )
    environment: Annotated[dict[str, str], Read(readers.read_variables)] = option(
        {},
        "More environment variables of the processes.",
        flag=None,
        expert=True,
        argument=Argument(
            help="Variables of the workers alone, a dict.", default=None, check=checks.check_environment
        ),
    )
