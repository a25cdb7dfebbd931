"""PartialState, AcceleratorState and GradientState: views of the process's runtime under the names users know."""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import detect, devices, environ, runtime
from .choices import Choice
from .comm import torch_dist
from .nested import honor_type, send_to_device
from .runtime import GradientFlags, Runtime
from .zero import chosen


class DistributedType(Choice):
    """How the processes of a run work together."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"


def distributed_type(of: Runtime) -> DistributedType:
    """Return the type of a run: that of its strategy, else by the kind of its devices; NO for one process."""
    if of.settings.distributed_type is not None:
        return DistributedType(of.settings.distributed_type)
    if of.device.type == "xla":
        return DistributedType.XLA
    if of.topology.world_size == 1:
        return DistributedType.NO
    types = {
        "cpu": DistributedType.MULTI_CPU,
        "cuda": DistributedType.MULTI_GPU,
        "xpu": DistributedType.MULTI_XPU,
    }
    return types[of.device.type]


class PartialState:
    """What this process is to the run, and the means to let processes take turns.

    The first one made opens the process group if WORLD_SIZE is above 1 and there is none; later ones show the same.

    Args:
        cpu: use no accelerator device.
        kwargs: `backend`, `init_method` and `timeout` of the process group.

    Raises:
        ValueError: the environment contradicts itself, or an argument contradicts the first call's.
    """

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        detect.ensure(cpu, **kwargs)

    @property
    def _runtime(self) -> Runtime:
        installed = runtime.current()
        if installed is None:
            # no AttributeError: inside a property Python would report the property as missing
            raise RuntimeError(f"the state was reset: make a new {type(self).__name__} or Accelerator")
        return installed

    def __repr__(self) -> str:
        if runtime.current() is None:
            return f"{type(self).__name__}(reset)"
        backend = f"  Backend: {self.backend}" if self.backend else ""
        return (
            f"Distributed environment: {self.distributed_type}{backend}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )

    @classmethod
    def _reset_state(cls) -> None:
        """Forget everything; an open process group stays open."""
        runtime.reset()

    @property
    def initialized(self) -> bool:
        """False after a reset."""
        return runtime.current() is not None

    @property
    def distributed_type(self) -> DistributedType:
        """How the processes work together."""
        return distributed_type(self._runtime)

    @property
    def backend(self) -> str | None:
        """Collective backend, None in a single process."""
        return self._runtime.settings.backend

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._runtime.device

    @property
    def default_device(self) -> torch.device:
        """The kind of device that a first process would use now: the environment's choice, else the best one."""
        return devices.requested() or torch.device(devices.best().name)

    @property
    def debug(self) -> bool:
        """True if the inputs of collectives are compared."""
        return self._runtime.settings.debug

    @property
    def num_processes(self) -> int:
        """Processes of the run."""
        return self._runtime.topology.world_size

    @property
    def process_index(self) -> int:
        """Rank of this process."""
        return self._runtime.topology.rank

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its node."""
        return self._runtime.topology.local_rank

    @property
    def fork_launched(self) -> bool:
        """True in a worker that a notebook launched."""
        return environ.flag("FORK_LAUNCHED")

    @property
    def use_distributed(self) -> bool:
        """True if there is more than one process."""
        return self._runtime.topology.world_size > 1

    @property
    def is_last_process(self) -> bool:
        """True in the highest rank."""
        return self._runtime.topology.is_last

    @property
    def is_main_process(self) -> bool:
        """True in rank 0."""
        return self._runtime.topology.is_main

    @property
    def is_local_main_process(self) -> bool:
        """True in the first process of each node."""
        return self._runtime.topology.is_local_main

    def set_device(self) -> None:
        """Make this process's device the current one."""
        devices.use(self.device)

    def wait_for_everyone(self) -> None:
        """Return once every process has come here."""
        self._runtime.comm.barrier()

    def destroy_process_group(self, group: Any = None) -> None:
        """Destroy the group, the default one without an argument; that of a launched worker is its launcher's."""
        if group is not None or not self.fork_launched:
            torch_dist.close_group(group)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print in the first process of each node."""
        if self.is_local_main_process:
            builtins.print(*args, **kwargs)

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Any:
        """Return a context manager that gives this process its share of the inputs.

        Args:
            inputs: a list, tuple, tensor, dataset with `select`, or a dict of these with one length; the first
                processes get one item more where the length is no multiple. Anything else is given to all.
            apply_padding: repeat the last item where a share is shorter than the longest; tensors are then moved to
                the process's device.

        Raises:
            ValueError: the lengths in a dict differ.
        """
        return split_between(self._runtime, inputs, apply_padding)

    def main_process_first(self) -> Any:
        """Return a context manager whose block rank 0 runs before all others do."""
        return _taking_turns(self._runtime, self.is_main_process)

    def local_main_process_first(self) -> Any:
        """Return a context manager whose block the first process of each node runs before the others do."""
        return _taking_turns(self._runtime, self.is_local_main_process)

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function to run in rank 0 only; elsewhere it returns None."""
        return _only_where(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function to run in the first process of each node only; elsewhere it returns None."""
        return _only_where(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function to run in the highest rank only; elsewhere it returns None."""
        return _only_where(lambda: self.is_last_process, function)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """Decorate a function to run in one rank only; elsewhere it returns None."""
        return _only_where(lambda: not self.use_distributed or self.process_index == process_index, function)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Decorate a function to run in one process of each node only; elsewhere it returns None."""
        return _only_where(
            lambda: not self.use_distributed or self.local_process_index == local_process_index, function
        )


class AcceleratorState(PartialState):
    """What `PartialState` shows, and the precision; an `Accelerator` must have been made before.

    Raises:
        ValueError: there is no accelerator yet, or an argument contradicts it.
        NotImplementedError: a plugin is given.
    """

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: Any = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        plugins = (dynamo_plugin, deepspeed_plugin, fsdp_plugin, torch_tp_plugin, megatron_lm_plugin)
        if any(plugin is not None for plugin in (*plugins, parallelism_config)):
            raise NotImplementedError("AcceleratorState takes no plugins: leave them out")
        super().__init__(cpu, **kwargs)
        if not _from_accelerator and not self._runtime.accelerated:
            raise ValueError("make an Accelerator() before an AcceleratorState()")
        own = self._runtime.settings.mixed_precision
        if mixed_precision is not None and str(mixed_precision).lower() != own:
            raise ValueError(
                f"mixed_precision={str(mixed_precision)!r} comes too late: the first Accelerator chose {own!r}"
            )

    def __repr__(self) -> str:
        return f"{super().__repr__()}\nMixed precision type: {self.mixed_precision}\n"

    @classmethod
    def _reset_state(cls, reset_partial_state: bool = False) -> None:
        """Forget that there was an accelerator, and with `reset_partial_state` everything."""
        installed = runtime.current()
        if reset_partial_state:
            runtime.reset()
        elif installed is not None:
            installed.accelerated = False

    @property
    def initialized(self) -> bool:
        """True while there is an accelerator."""
        installed = runtime.current()
        return installed is not None and installed.accelerated

    @property
    def mixed_precision(self) -> str:
        """`no`, `bf16`, `fp16` or `fp8`."""
        return self._runtime.settings.mixed_precision

    @property
    def dynamo_plugin(self) -> Any:
        """What the first accelerator compiles models with."""
        return self._runtime.settings.dynamo_plugin

    @property
    def is_fsdp2(self) -> bool:
        """True if weights are sharded by fully_shard."""
        return self._runtime.settings.shards_weights

    @property
    def fsdp_plugin(self) -> Any:
        """How FSDP shards models, None where it does not."""
        return self._runtime.settings.fsdp_plugin

    @property
    def parallelism_config(self) -> Any:
        """The sizes of each kind of parallelism, None where they are not combined."""
        return self._runtime.settings.parallelism_config

    @property
    def deepspeed_plugin(self) -> Any:
        """The selected plugin of DeepSpeed, None where that does not train."""
        return chosen.selected(self._runtime.settings.deepspeed_plugins)

    def get_deepspeed_plugin(self, name: str) -> Any:
        """Return the plugin of this name; ValueError without one."""
        return chosen.named(self._runtime.settings.deepspeed_plugins, name)

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Let models that are made and prepared from now on use the plugin of this name; None is the first."""
        chosen.select(self._runtime.settings.deepspeed_plugins, name)


class GradientState:
    """Where gradient accumulation stands.

    Args:
        gradient_accumulation_plugin: an object with a `to_kwargs` that returns what to change of `num_steps`,
            `adjust_scheduler`, `sync_with_dataloader` and `sync_each_batch`.
    """

    def __init__(self, gradient_accumulation_plugin: Any = None) -> None:
        self._alone = GradientFlags()
        if gradient_accumulation_plugin is not None:
            for name, value in gradient_accumulation_plugin.to_kwargs().items():
                setattr(self._flags, name, value)

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
        )

    @classmethod
    def _reset_state(cls) -> None:
        """Start over with default flags."""
        installed = runtime.current()
        if installed is not None:
            installed.gradient = GradientFlags()

    @property
    def _flags(self) -> GradientFlags:
        installed = runtime.current()
        return self._alone if installed is None else installed.gradient

    @property
    def initialized(self) -> bool:
        """True: the flags have defaults."""
        return True

    @property
    def sync_gradients(self) -> bool:
        """True when the next optimizer step is to happen."""
        return self._flags.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._flags.sync_gradients = value

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self._flags.sync_gradients = sync_gradients

    @property
    def num_steps(self) -> int:
        """Batches per optimizer step."""
        return self._flags.num_steps

    @property
    def adjust_scheduler(self) -> bool:
        """What the user asked for; schedules step with the optimizer in either case."""
        return self._flags.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """True makes the last batch of a loader a step."""
        return self._flags.sync_with_dataloader

    @property
    def end_of_dataloader(self) -> bool:
        """True while the active loader hands out its last batch."""
        return self._flags.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Samples of the last global batch that are no duplicates; -1 where unknown."""
        return self._flags.remainder

    @property
    def in_dataloader(self) -> bool:
        """True while a prepared loader is iterated."""
        return self._flags.active is not None

    @property
    def active_dataloader(self) -> Any:
        """The innermost prepared loader that is iterated, None without one."""
        return self._flags.active

    @property
    def dataloader_references(self) -> list[Any]:
        """The prepared loaders that are iterated, after a None, innermost last."""
        return [None, *(reference() for reference in self._flags.loaders)]

    @property
    def is_xla_gradients_synced(self) -> bool:
        """True from when gradients on XLA devices were averaged to the step; set it to True after doing so yourself."""
        return self._flags.xla_gradients_synced

    @is_xla_gradients_synced.setter
    def is_xla_gradients_synced(self, is_synced: bool) -> None:
        self._flags.xla_gradients_synced = is_synced

    def _add_dataloader(self, dataloader: Any) -> None:
        self._flags.begin(dataloader)

    def _remove_dataloader(self, dataloader: Any) -> None:
        self._flags.end(dataloader)


@contextmanager
def split_between(of: Runtime, inputs: Any, apply_padding: bool) -> Iterator[Any]:
    """Yield this process's share, see `PartialState.split_between_processes`."""
    world_size, rank = of.topology.world_size, of.topology.rank
    if world_size == 1:
        yield inputs
        return
    if isinstance(inputs, dict):
        lengths = {key: len(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"all values of the dict must have one length, but they have {lengths}")
        length = next(iter(lengths.values()), 0)
    else:
        length = len(inputs) if hasattr(inputs, "__len__") else 0
    size, extra = divmod(length, world_size)
    start = rank * size + min(rank, extra)
    own = size + (rank < extra)
    missing = (size + (extra > 0) - own) if apply_padding and length else 0
    part = _take(inputs, start, own, missing)
    yield send_to_device(part, of.device) if apply_padding else part


def _take(inputs: Any, start: int, own: int, missing: int) -> Any:
    if isinstance(inputs, dict):
        return {key: _take(value, start, own, missing) for key, value in inputs.items()}
    if isinstance(inputs, torch.Tensor):
        part = inputs[start : start + own]
        return torch.cat([part, inputs[-1:].expand(missing, *inputs.shape[1:])]) if missing else part
    if isinstance(inputs, (list, tuple)):
        return honor_type(
            inputs, [*inputs[start : start + own], *([inputs[-1]] * missing if missing else [])]
        )
    if hasattr(inputs, "select") and hasattr(inputs, "__len__"):
        return inputs.select([*range(start, start + own), *([len(inputs) - 1] * missing)])
    return inputs


@contextmanager
def _taking_turns(of: Runtime, first: bool) -> Iterator[None]:
    if not first:
        of.comm.barrier()
    try:
        yield
    finally:
        if first:
            of.comm.barrier()


def _only_where(condition: Callable[[], bool], function: Callable[..., Any] | None) -> Any:
    """Return a function that runs where the condition holds when it is called; a decorator without a function."""
    if function is None:
        return functools.partial(_only_where, condition)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if condition() else None

    return run
