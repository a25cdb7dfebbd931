"""Options passed through to torch: one dataclass for each thing that can be customised."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from .choices import Choice

if TYPE_CHECKING:
    import torch

_ACTIVITIES: Final = ("cpu", "cuda", "xpu", "mtia")
_CYCLE: Final = ("wait", "warmup", "active", "repeat", "skip_first", "skip_first_wait")


@dataclass
class KwargsHandler:
    """Base of all handlers; a field that keeps its default is left to torch."""

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
    """Arguments of `torch.distributed.init_process_group`; the default backend stands for the device's own."""

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
        comm_wrapper: cast to this before a PowerSGD hook; FP16, BF16 or NO.
        comm_state_option: arguments of `PowerSGDState`.
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

    def __post_init__(self) -> None:
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

        legal = list(inspect.signature(powerSGD_hook.PowerSGDState).parameters)[
            1:
        ]  # without the process group
        if unknown := sorted(self.comm_state_option.keys() - set(legal)):
            raise ValueError(
                f"comm_state_option {unknown} are not arguments of torch's PowerSGDState, "
                f"choose among {', '.join(legal)}"
            )

    def to_dict(
        self, ignore_keys: Sequence[str] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """Return a copy of the fields that torch takes."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: Any) -> None:
        """Give the wrapped model the hook that compresses its messages; ValueError where its backend has none."""
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
        chosen = kind(self.comm_hook)
        if chosen is kind.NO:
            return
        if chosen is kind.BATCHED_POWER_SGD and not _orthogonalizes_matrices(powerSGD_hook):
            raise ValueError(
                f"comm_hook 'batched_power_sgd' fails in torch {torch.__version__} as soon as it compresses, "
                "after start_powerSGD_iter steps: choose power_sgd"
            )
        hook: Any = hooks[chosen]
        wrapper: Any = wrappers.get(kind(self.comm_wrapper))
        state = None
        if chosen in (kind.POWER_SGD, kind.BATCHED_POWER_SGD):
            state = powerSGD_hook.PowerSGDState(None, **self.comm_state_option)
        try:
            model.register_comm_hook(state=state, hook=hook if wrapper is None else wrapper(hook))
        except TypeError as error:
            raise ValueError(
                f"comm_hook {str(chosen)!r} with comm_wrapper {str(self.comm_wrapper)!r} does not work with this "
                f"backend, {torch.distributed.get_backend()}: torch says {str(error)!r}; "
                "fp16 compresses on every backend"
            ) from error


def _orthogonalizes_matrices(hooks: Any) -> bool:
    """Return False for a torch whose batched hook hands single matrices to a function that takes stacks of them."""
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
        adjust_scheduler: without effect, as in Accelerate: schedules step with the optimizer in either case.
        sync_with_dataloader: make the last batch of a loader a step.
        sync_each_batch: reduce gradients on accumulated batches too, which saves memory and costs time.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False


@dataclass
class ProfileKwargs(KwargsHandler):
    """Arguments of `torch.profiler.profile`, and where its trace goes.

    Attributes:
        activities: what is recorded: `cpu`, `cuda`, `xpu` or `mtia`; None is all that this machine has.
        schedule_option: arguments of `torch.profiler.schedule`; needs `wait`, `warmup` and `active`, in steps.
        on_trace_ready: called with the profiler at the end of each cycle of the schedule.
        record_shapes: record the shapes of inputs.
        profile_memory: record what is allocated and freed.
        with_stack: record file and line.
        with_flops: estimate floating point operations.
        with_modules: record which module an operation belongs to.
        output_trace_dir: folder for the traces of `Accelerator.profile`, a file for each process.
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

    def __post_init__(self) -> None:
        unknown = [name for name in self.activities or () if name not in _ACTIVITIES]
        if unknown:
            raise ValueError(f"activities {unknown} are unknown, choose among {', '.join(_ACTIVITIES)}")
        if self.schedule_option is not None:
            given = set(self.schedule_option)
            if given - set(_CYCLE) or not given >= {"wait", "warmup", "active"}:
                raise ValueError(
                    f"schedule_option {self.schedule_option} needs wait, warmup and active, "
                    "and takes repeat, skip_first and skip_first_wait besides"
                )

    def build(self) -> torch.profiler.profile:
        """Return a profiler that has not started.

        Activities that this machine cannot record are left out with a warning; ValueError if no other is left.
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
                warnings.warn(f"{text} and are left out", stacklevel=3)
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
