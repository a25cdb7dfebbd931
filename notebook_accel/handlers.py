"""Arguments of an Accelerator that are dataclasses: for torch, for accumulation, for data loaders, for the project."""

from __future__ import annotations

import contextlib
import copy
import inspect
import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from numbers import Integral
from typing import TYPE_CHECKING, Any, Final

from .caller import warn
from .checked import Checked
from .choices import Choice
from .probes import at_least, version

if TYPE_CHECKING:
    import torch

_CYCLE: Final = ("wait", "warmup", "active", "repeat", "skip_first", "skip_first_wait")


@dataclass
class KwargsHandler(Checked):
    """Base of all handlers; only fields that differ from their defaults are passed on."""

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of all fields."""
        return {item.name: copy.deepcopy(getattr(self, item.name)) for item in fields(self)}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        defaults = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != defaults[name]}


@dataclass
class AutocastKwargs(KwargsHandler):
    """Arguments of `torch.autocast`."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Arguments of `torch.amp.GradScaler`."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Arguments of `torch.distributed.init_process_group`; the default backend means that of the device."""

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None


class DDPCommunicationHookType(Choice):
    """How DistributedDataParallel compresses gradients before it sends them."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Arguments of `DistributedDataParallel`, and the hook that compresses its messages.

    Attributes:
        comm_hook: how gradients are compressed.
        comm_wrapper: cast gradients to FP16 or BF16 before the hook; NO does not cast.
        comm_state_option: arguments of torch's `PowerSGDState`.

    Raises:
        ValueError: a hook, wrapper or argument is unknown.
        TypeError: `comm_state_option` is no dict.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def _complete_fields(self) -> None:
        kind = DDPCommunicationHookType
        legal = {"comm_hook": tuple(kind), "comm_wrapper": (kind.NO, kind.FP16, kind.BF16)}
        for name, choices in legal.items():
            if (value := getattr(self, name)) not in choices:
                raise ValueError(
                    f"{name} {str(value)!r} is unknown, choose among {', '.join(map(str, choices))}"
                )
        if not isinstance(self.comm_state_option, dict):
            raise TypeError(f"comm_state_option is a dict, not {self.comm_state_option!r}")
        if self.comm_state_option:
            self._check_state_option()

    def _check_state_option(self) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        _, *legal = inspect.signature(
            powerSGD_hook.PowerSGDState
        ).parameters  # the first is the process group
        if unknown := sorted(self.comm_state_option.keys() - set(legal)):
            raise ValueError(
                f"comm_state_option {unknown} are not arguments of torch's PowerSGDState, "
                f"choose among {', '.join(legal)}"
            )

    def to_dict(
        self, ignore_keys: Sequence[str] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """Return a copy of the arguments of `DistributedDataParallel`.

        Args:
            ignore_keys: fields to leave out.
        """
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: Any) -> None:
        """Register the hook that compresses gradients.

        Args:
            model: a `DistributedDataParallel`.

        Raises:
            ValueError: the hook does not work with this backend or this torch.
        """
        import torch
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        kind = DDPCommunicationHookType
        hooks = {
            kind.FP16: default_hooks.fp16_compress_hook,
            kind.BF16: default_hooks.bf16_compress_hook,
            kind.POWER_SGD: powerSGD_hook.powerSGD_hook,
            kind.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
        }
        wrappers = {
            kind.FP16: default_hooks.fp16_compress_wrapper,
            kind.BF16: default_hooks.bf16_compress_wrapper,
        }
        name = kind(self.comm_hook)
        if name is kind.NO:
            return
        if name is kind.BATCHED_POWER_SGD and not _orthogonalizes_matrices(powerSGD_hook):
            raise ValueError(
                f"comm_hook 'batched_power_sgd' fails in torch {torch.__version__} as soon as it compresses, "
                "after start_powerSGD_iter steps: choose power_sgd"
            )
        hook: Any = hooks[name]
        wrapper: Any = wrappers.get(kind(self.comm_wrapper))
        state = None
        if name in (kind.POWER_SGD, kind.BATCHED_POWER_SGD):
            state = powerSGD_hook.PowerSGDState(None, **self.comm_state_option)
        try:
            model.register_comm_hook(state=state, hook=hook if wrapper is None else wrapper(hook))
        except TypeError as error:
            raise ValueError(
                f"comm_hook {str(name)!r} with comm_wrapper {str(self.comm_wrapper)!r} does not work with this "
                f"backend, {torch.distributed.get_backend()}: torch says {str(error)!r}; "
                "fp16 compresses on every backend"
            ) from error


def _orthogonalizes_matrices(hooks: Any) -> bool:
    """Return False for a torch whose batched hook passes one matrix to a function that takes a batch of them."""
    import torch

    orthogonalize = getattr(hooks, "_orthogonalize", None)
    if orthogonalize is None:
        return True
    try:
        orthogonalize(torch.eye(2))
    except AssertionError:
        return False
    return True


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How gradients accumulate.

    Attributes:
        num_steps: batches per optimizer step.
        adjust_scheduler: has no effect, as in Accelerate: schedules always step with the optimizer.
        sync_with_dataloader: step after the last batch of a loader.
        sync_each_batch: reduce gradients for accumulated batches too, which saves memory and takes time.

    Raises:
        TypeError: `num_steps` is no integer, or another field neither true nor false.
        ValueError: `num_steps` is below 1.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def _complete_fields(self) -> None:
        if self.num_steps is not None:
            self.num_steps = _read_integer("num_steps", self.num_steps)
            if self.num_steps < 1:
                raise ValueError(f"num_steps={self.num_steps!r}: at least 1 is needed")


def _read_integer(name: str, value: Any) -> int:
    with contextlib.suppress(TypeError):
        if not isinstance(value, bool):
            return operator.index(value)
    raise TypeError(f"{name}={value!r}: an integer is needed")


def _is_device_type(name: str) -> bool:
    """Return whether torch knows a kind of device."""
    import torch

    try:
        return torch.device(name).index is None
    except (RuntimeError, TypeError):
        return False


@dataclass
class ProfileKwargs(KwargsHandler):
    """Arguments of `torch.profiler.profile`, and the folder of its traces.

    Attributes:
        activities: what to record: `cpu` or a kind of device, such as `cuda`; by default all that this machine has.
        schedule_option: arguments of `torch.profiler.schedule`; needs `wait`, `warmup` and `active`, in steps.
        on_trace_ready: called with the profiler at the end of each cycle of the schedule.
        record_shapes: record the shapes of inputs.
        profile_memory: record when memory is allocated and freed.
        with_stack: record file and line.
        with_flops: estimate floating point operations.
        with_modules: record which module an operation belongs to.
        output_trace_dir: folder for the traces of `Accelerator.profile`, a file for each process.

    Raises:
        ValueError: an activity is unknown, or `schedule_option` has other keys.
    """

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def _complete_fields(self) -> None:
        if unknown := [name for name in self.activities or () if not _is_device_type(name)]:
            raise ValueError(
                f"activities {unknown} are unknown, choose 'cpu' or kinds of devices such as 'cuda'"
            )
        if self.schedule_option is not None:
            given = set(self.schedule_option)
            if given - set(_CYCLE) or not given >= {"wait", "warmup", "active"}:
                raise ValueError(
                    f"schedule_option {self.schedule_option} needs wait, warmup and active, "
                    "and takes repeat, skip_first and skip_first_wait besides"
                )

    def build(self) -> torch.profiler.profile:
        """Return a profiler that has not started; a warning names activities that this machine cannot record.

        Raises:
            ValueError: it can record none of them.
        """
        from torch import profiler

        activities = None
        if self.activities is not None:
            able = {activity.name.lower(): activity for activity in profiler.supported_activities()}
            activities = [able[name] for name in self.activities if name in able]
            if missing := [name for name in self.activities if name not in able]:
                text = f"activities {missing} cannot be recorded here"
                if not activities:
                    raise ValueError(f"{text}, choose among {', '.join(sorted(able))}")
                warn(f"{text} and are left out")
        return profiler.profile(
            activities=activities,
            schedule=None if self.schedule_option is None else profiler.schedule(**self.schedule_option),
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


@dataclass
class DataLoaderConfiguration(Checked):
    """How data loaders are shared out among the processes.

    Attributes:
        split_batches: True splits each batch of the loader over the processes, so that the batch size is the
            total one; False gives every process whole batches.
        dispatch_batches: True reads on rank 0 and sends every process its part; None does so for iterable
            datasets.
        even_batches: True repeats samples from the start so that all processes get equal batches.
        use_seedable_sampler: True shuffles by seed and epoch alone, see `SeedableRandomSampler`.
        data_seed: its seed; None takes that of torch's global generator.
        non_blocking: True copies from pinned memory while the computation goes on.
        use_stateful_dataloader: True gives loaders `state_dict` and `load_state_dict`, to go on in the middle of
            an epoch; needs torchdata.
        already_sharded: True if each process makes loaders of its own share, whose batches stay as they are; False if
            all make the same ones; None finds it out, see `prepare_data_loader`.

    Raises:
        TypeError: `data_seed` is no integer, or another field neither true nor false.
        ImportError: `use_stateful_dataloader` without torchdata.
    """

    _is_closed = True

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    already_sharded: bool | None = None

    def _complete_fields(self) -> None:
        if self.data_seed is not None:
            self.data_seed = _read_integer("data_seed", self.data_seed)
        if self.use_stateful_dataloader:
            require_torchdata()


def require_torchdata() -> None:
    """Raise ImportError unless there is a torchdata whose loaders have a state."""
    if not at_least("torchdata", "0.11"):
        found = version("torchdata")
        raise ImportError(
            f"use_stateful_dataloader=True needs torchdata 0.11 or later, and "
            f"{'there is none' if found is None else f'this is {found}'}: pip install 'notebook-accel[stateful]'"
        )


@dataclass
class ProjectConfiguration(Checked):
    """Folders and checkpoints of a run.

    Attributes:
        project_dir: folder for what the run writes.
        logging_dir: folder for logs; by default `project_dir`.
        automatic_checkpoint_naming: save to `project_dir/checkpoints/checkpoint_N`, N counting from `iteration`.
        total_limit: how many automatically named checkpoints are kept; the older ones are removed once the new
            one is on the disk. None keeps all.
        iteration: number of the next checkpoint.
        save_on_each_node: write what all processes share once on each node, where nodes share no disk.

    Raises:
        ValueError: `total_limit` or `iteration` is too small.
    """

    project_dir: str | os.PathLike[str] | None = None
    logging_dir: str | os.PathLike[str] | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def _complete_fields(self) -> None:
        for name, optional in (("total_limit", True), ("iteration", False)):
            number = getattr(self, name)
            if isinstance(number, bool) or not (
                isinstance(number, Integral) or (optional and number is None)
            ):
                raise TypeError(f"{name}={number!r}: an integer is needed")
        if self.total_limit is not None and self.total_limit < 1:
            raise ValueError(f"total_limit {self.total_limit} < 1: the last checkpoint is always kept")
        if self.iteration < 0:
            raise ValueError(f"iteration {self.iteration} < 0")
        if self.logging_dir is None:
            self.logging_dir = self.project_dir

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set `project_dir`, and `logging_dir` where it has none."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir
