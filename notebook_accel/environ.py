"""The table of all environment variables that are read or written; only this module touches `os.environ`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

TABLE: Final[Mapping[str, str]] = {
    # set by torchrun, torch elastic and our launcher; read to find the topology
    "RANK": "global rank of this process",
    "LOCAL_RANK": "rank among the processes of this node",
    "WORLD_SIZE": "number of processes in the run",
    "LOCAL_WORLD_SIZE": "number of processes on this node",
    "GROUP_RANK": "rank of this node",
    "GROUP_WORLD_SIZE": "number of nodes in the run",
    "MASTER_ADDR": "address of the rendezvous store",
    "MASTER_PORT": "port of the rendezvous store",
    "TORCHELASTIC_USE_AGENT_STORE": "'True' where the launcher hosts the rendezvous store",
    "TORCHELASTIC_RESTART_COUNT": "how often the run was restarted",
    "TORCHELASTIC_MAX_RESTARTS": "how often the run may be restarted",
    "TORCHELASTIC_RUN_ID": "name of the run",
    "TORCHELASTIC_ERROR_FILE": "file a worker of torch elastic writes its error to",
    # of the system
    "PATH": "folders with programs",
    # set by sshd on a host
    "SSH_CONNECTION": "address and port of the client, and of this host",
    # set by SLURM in a job, and on its nodes
    "SLURM_JOB_ID": "number of the job that this process runs in",
    "SLURM_RESTART_COUNT": "how often SLURM has queued that job again",
    "SLURM_GPUS_ON_NODE": "number of GPUs of the job on this node",
    "SLURM_LAUNCH_NODE_IPADDR": "address of the machine that started the step",
    # as Accelerate names them; read, so that its users' settings keep working
    "ACCELERATE_MIXED_PRECISION": "no, fp16, bf16 or fp8",
    "ACCELERATE_USE_CPU": "true: do not use an accelerator device",
    "ACCELERATE_TORCH_DEVICE": "device to use, for example cuda:1",
    "ACCELERATE_DEBUG_MODE": "true: make a dry launch first, and check every collective's inputs",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "batches per optimizer step",
    "ACCELERATE_LOG_LEVEL": "level of the loggers of get_logger and of the root logger",
    "ACCELERATE_DYNAMO_BACKEND": "what torch.compile compiles models with; no compiles nothing",
    "ACCELERATE_DYNAMO_MODE": "mode of torch.compile",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "true: a model that is no single graph is an error",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "true: compile for any shape, false: for one shape each",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "true: compile repeated blocks one by one",
    "ACCELERATE_FP8_BACKEND": "library for fp8: AO, which is torchao",
    "ACCELERATE_FP8_PAD_INNER_DIM": "false: do not pad batches of float8 layers",
    "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": "true: send sharded weights in float8",
    "ACCELERATE_USE_FSDP": "true: models are sharded by FSDP",
    "ACCELERATE_USE_DEEPSPEED": "true: DeepSpeed trains",
    "ACCELERATE_USE_MEGATRON_LM": "true: Megatron-LM trains",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true: several kinds of parallelism are combined",
    "ACCELERATE_INIT_INCLUDE_BUFFERS": "true: empty models have their buffers without values too",
    "FSDP_VERSION": "1 or 2: how FSDP's options are spelled",
    "FSDP_SHARDING_STRATEGY": "what FSDP shards",
    "FSDP_RESHARD_AFTER_FORWARD": "false: weights stay whole from forward to backward",
    "FSDP_BACKWARD_PREFETCH": "when FSDP gathers the next weights in backward",
    "FSDP_FORWARD_PREFETCH": "true: gather the next weights early in forward",
    "FSDP_AUTO_WRAP_POLICY": "which modules FSDP shards each on their own",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "class names of these modules, separated by commas",
    "FSDP_MIN_NUM_PARAMS": "parameters from which on a module is one of them",
    "FSDP_OFFLOAD_PARAMS": "true: weights are kept in the CPU's memory",
    "FSDP_STATE_DICT_TYPE": "how checkpoints of FSDP are written",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true: rank 0 alone reads pretrained weights; read by transformers too",
    "FSDP_SYNC_MODULE_STATES": "false: each process starts with its own weights",
    "FSDP_USE_ORIG_PARAMS": "accepted",
    "FSDP_ACTIVATION_CHECKPOINTING": "true: activations are computed again in backward",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true: what is left of them waits in the CPU's memory",
    "FSDP_IGNORED_MODULES": "pattern of the names of modules that are not sharded",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "copies of the model",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "processes over which a copy is sharded",
    "PARALLELISM_CONFIG_TP_SIZE": "processes that share each layer",
    "PARALLELISM_CONFIG_CP_SIZE": "processes that share each sequence",
    "PARALLELISM_CONFIG_CP_BACKEND": "torch",
    "PARALLELISM_CONFIG_CP_COMM_STRATEGY": "allgather or alltoall",
    "PARALLELISM_CONFIG_SP_SIZE": "processes that share each sequence by DeepSpeed",
    "PARALLELISM_CONFIG_SP_BACKEND": "deepspeed",
    "ACCELERATE_CPU_AFFINITY": "true: run each process on the cores near its GPU",
    "ACCELERATE_DOWNCAST_BF16": "true: with bf16 on XLA devices, float32 is stored as bfloat16, float64 as float32",
    "ACCELERATE_GRADIENT_CLIPPING": "largest norm of gradients under DeepSpeed",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "DeepSpeed's own config file",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "what ZeRO shards: 1 optimizer state, 2 gradients too, 3 weights too",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "where optimizer state is kept: none, cpu or nvme",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "where weights are kept: none, cpu or nvme",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": "folder for optimizer state on NVMe",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "folder for weights on NVMe",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true: models of Transformers are sharded from the start",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true: DeepSpeed's save_16bit_model gathers weights of ZeRO 3",
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "class names of mixture-of-experts layers, separated by commas",
    "DS_ACCELERATOR": "kind of device that DeepSpeed uses: cpu, cuda, ...",
    "FORK_LAUNCHED": "true in a worker that a notebook launched",
    # ours
    "NOTEBOOK_ACCEL_AS_ACCELERATE": "true: imports of accelerate give the names of this package",
    "NOTEBOOK_ACCEL_VIEW": "what shows a run where the launch leaves it open: widget, text or none",
    "NOTEBOOK_ACCEL_SECRET": "secret of a run on several nodes; workers do not get it",
    "NOTEBOOK_ACCEL_SECRET_FILE": "file with the secret of a run on several nodes; only its user may read it",
    "NOTEBOOK_ACCEL_STATE": "folder of runs that outlive their notebooks",
    "NOTEBOOK_ACCEL_STATE_DAYS": "days after which such a run is removed once it is over; 30 where it is not set",
    "NOTEBOOK_ACCEL_AGENT": "false: a notebook starts no agent before a launch needs it",
    "NOTEBOOK_ACCEL_TPU_MODE": "process: a process per XLA device; spmd: one program over all, which splits batches",
    # where config files lie
    "HF_HOME": "folder of Hugging Face libraries",
    "XDG_CACHE_HOME": "folder of cached files",
    "XDG_STATE_HOME": "folder of what programs keep between their runs",
    # torch and its libraries
    "LOGLEVEL": "level of torch elastic's loggers",
    "USE_TORCH_XLA": "false: is_torch_xla_available() is False, for who asks it whether to use torch_xla",
    "PJRT_DEVICE": "kind of device that torch_xla uses: TPU or CPU",
    "CPU_NUM_DEVICES": "devices of torch_xla where that kind is CPU",
    "XLA_DOWNCAST_BF16": "1: torch_xla stores float32 as bfloat16, float64 as float32",
    "OMP_NUM_THREADS": "threads of one process's CPU kernels",
    "CUDA_VISIBLE_DEVICES": "CUDA devices this process may use",
    "ZE_AFFINITY_MASK": "the same for devices of Intel",
    "ASCEND_RT_VISIBLE_DEVICES": "of Ascend",
    "MLU_VISIBLE_DEVICES": "of Cambricon",
    "MUSA_VISIBLE_DEVICES": "of Moore Threads",
    "SDAA_VISIBLE_DEVICES": "of Tecorigin",
    "HABANA_VISIBLE_MODULES": "of Gaudi",
    "NEURON_RT_VISIBLE_CORES": "of AWS",
    "CUBLAS_WORKSPACE_CONFIG": "needed by deterministic CUDA algorithms",
    "GLOO_SOCKET_IFNAME": "network interface for gloo",
    "NCCL_SOCKET_IFNAME": "network interface for nccl",
    "NCCL_P2P_DISABLE": "1: no direct copies between GPUs",
    "NCCL_IB_DISABLE": "1: no InfiniBand",
    "PYTORCH_ENABLE_MPS_FALLBACK": "1: run on the CPU what MPS lacks",
    "MPLBACKEND": "matplotlib's backend",
    "RAY_ADDRESS": "Ray cluster to use",
    "RAY_TMPDIR": "Ray's folder for temporary files",
    # TPU machines and hosted notebooks
    "XLA_USE_SPMD": "1: one process uses all devices of a machine; set by torch_xla",
    "KAGGLE_KERNEL_RUN_TYPE": "Interactive or Batch on Kaggle's machines",
    "KAGGLE_URL_BASE": "address of Kaggle, on its machines",
    "KUBERNETES_SERVICE_HOST": "address of the cluster, in its containers",
    "COLAB_RELEASE_TAG": "release of the image, on Google Colab's machines",
    "ISTPUVM": "1 on Kaggle's machines with a TPU",
    "TPU_NAME": "name of the TPU",
    "TPU_ACCELERATOR_TYPE": "kind and size of the TPU, for example v5litepod-8",
    "TPU_CHIPS_PER_HOST_BOUNDS": "the chips of a machine, as in 2,2,1",
    "TPU_PROCESS_BOUNDS": "the processes of a run on a TPU, as in 2,2,1",
    "TPU_VISIBLE_CHIPS": "chips this process may use",
    "TPU_PROCESS_ADDRESSES": "addresses of the processes of a run on a TPU",
    "TPU_PROCESS_PORT": "port of this process of a run on a TPU",
    "CLOUD_TPU_TASK_ID": "number of this process of a run on a TPU",
    # as the trackers' libraries name them
    "MLFLOW_EXPERIMENT_NAME": "experiment of MLflow's tracker",
    "MLFLOW_RUN_ID": "run that MLflow's tracker goes on with",
    "MLFLOW_TAGS": "tags of MLflow's run, as JSON",
    "MLFLOW_NESTED_RUN": "true: MLflow's run is opened inside the active one",
    "CLEARML_PROJECT": "project of ClearML's tracker",
    "CLEARML_TASK": "task of ClearML's tracker",
}


class VariableError(ValueError):
    """An environment variable has a value that is not legal."""


_TRUE: Final = frozenset({"1", "true", "t", "yes", "y", "on"})
_FALSE: Final = frozenset({"0", "false", "f", "no", "n", "off", ""})


def parse_bool(text: str) -> bool:
    """Return the boolean that a word stands for.

    Args:
        text: 1, true, t, yes, y, on, or 0, false, f, no, n, off, or empty; in any case.

    Raises:
        ValueError: it is another word.
    """
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError(f"{text!r} is neither true (1, true, t, yes, y, on) nor false (0, false, f, no, n, off)")


def get(name: str, default: str | None = None) -> str | None:
    """Return the text of a variable.

    Args:
        name: of the variable; has to be in `TABLE`.
        default: returned if it is not set.
    """
    return os.environ.get(_check_known(name), default)


def flag(name: str, default: bool = False) -> bool:
    """Return a variable as a boolean.

    Args:
        name: of the variable; has to be in `TABLE`.
        default: returned if it is not set.

    Raises:
        VariableError: its text is not one of `parse_bool`; the message names the variable.
    """
    found = flag_in(os.environ, name)
    return default if found is None else found


def flag_in(values: Mapping[str, str], name: str) -> bool | None:
    """Return a variable of any environment as a boolean, None if it is not set.

    Args:
        values: the environment.
        name: of the variable; has to be in `TABLE`.

    Raises:
        VariableError: see `flag`.
    """
    text = values.get(_check_known(name))
    if text is None:
        return None
    try:
        return parse_bool(text)
    except ValueError as error:
        raise VariableError(f"environment variable {name}: {error}") from None


def integer(name: str, default: int | None = None) -> int | None:
    """Return a variable as an integer.

    Args:
        name: of the variable; has to be in `TABLE`.
        default: returned if it is not set or empty.

    Raises:
        VariableError: it is no integer; the message names the variable.
    """
    text = os.environ.get(_check_known(name))
    if text is None or not text.strip():
        return default
    try:
        return int(text)
    except ValueError:
        raise VariableError(f"environment variable {name}={text!r} is not an integer") from None


def put(values: Mapping[str, str]) -> None:
    """Set variables of this process.

    Args:
        values: texts by name.
    """
    os.environ.update(values)


def drop(*names: str) -> None:
    """Remove variables of this process.

    Args:
        names: those that are not set are ignored.
    """
    for name in names:
        os.environ.pop(_check_known(name), None)


def snapshot() -> dict[str, str]:
    """Return a copy of the whole environment."""
    return dict(os.environ)


def restore(saved: Mapping[str, str]) -> None:
    """Restore the environment.

    Args:
        saved: what `snapshot` returned.
    """
    for name in os.environ.keys() - saved.keys():
        del os.environ[name]
    for name, text in saved.items():
        if os.environ.get(name) != text:
            os.environ[name] = text


@contextmanager
def clear_environment() -> Iterator[None]:
    """Run the block with an empty environment, then restore the environment."""
    saved = snapshot()
    os.environ.clear()
    try:
        yield
    finally:
        restore(saved)


@contextmanager
def patch_environment(**kwargs: object) -> Iterator[None]:
    """Run the block with other values of some variables, then restore these variables.

    Args:
        kwargs: values by name; names become upper case and values text, a None is ignored.
    """
    texts = {name.upper(): str(value) for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in texts}
    os.environ.update(texts)
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text


def purge_accelerate_environment(func_or_cls: Any) -> Any:
    """Decorate a function, or all methods `test...` of a class, to restore ACCELERATE_* variables when it ends.

    Args:
        func_or_cls: a class is changed in place; its subclasses are decorated too.
    """
    if not isinstance(func_or_cls, type):
        return _restore_after(func_or_cls)
    inherited = func_or_cls.__init_subclass__

    def decorate_subclass(cls: Any, /, **kwargs: Any) -> None:
        inherited.__func__(cls, **kwargs) if hasattr(inherited, "__func__") else inherited(**kwargs)
        _purge_tests(cls)

    _purge_tests(func_or_cls)
    func_or_cls.__init_subclass__ = classmethod(decorate_subclass)  # type: ignore[assignment]
    return func_or_cls


def _purge_tests(cls: type) -> None:
    for name, value in list(vars(cls).items()):
        if name.startswith("test") and callable(value) and not isinstance(value, type):
            setattr(cls, name, _restore_after(value))


def _restore_after(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        before = {name: text for name, text in os.environ.items() if name.startswith("ACCELERATE_")}
        try:
            return function(*args, **kwargs)
        finally:
            for name in [
                name for name in os.environ if name.startswith("ACCELERATE_") and name not in before
            ]:
                del os.environ[name]
            os.environ.update(before)

    return wrapper


def _check_known(name: str) -> str:
    assert name in TABLE, f"{name} is missing from environ.TABLE"
    return name
