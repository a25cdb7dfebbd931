"""PartialState and AcceleratorState: the runtime of this process under Accelerate's names."""

from __future__ import annotations

import builtins
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from . import detect, devices, environ, runtime, state_pickles
from . import state_views as views
from .choices import DistributedType as DistributedType
from .comm import torch_dist
from .gradient_state import GradientState as GradientState
from .processes import run_if, split_between_processes, take_turns
from .runtime import Runtime
from .takeover.names import complete_names
from .topology import pretend


class PartialState(metaclass=views.StateType):
    """Rank, device and world size of this process, and contexts in which processes take turns.

    The first instance opens the process group, if WORLD_SIZE is above 1 and there is none. Later instances show the
    same state, with attributes of the user's. Numbers and devices can be set, as tests do that try what other processes
    would do: all that asks later gets them, and no process or group changes.

    Args:
        cpu: use no accelerator device.
        kwargs: `backend`, `init_method` and `timeout` of the process group.

    Raises:
        ValueError: variables contradict each other, or an argument differs from that of the first instance.
    """

    _shared_state: ClassVar[Any]
    _restore: ClassVar = views.SavedState.restore_run
    _enters: ClassVar = True

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        detect.ensure(cpu, **kwargs)
        views.attach(self)

    __getstate__ = state_pickles.list_own
    __setstate__ = state_pickles.set_own

    @classmethod
    def _list_shared(cls) -> dict[str, Any]:
        """Return what all instances show, by name; nothing after a reset."""
        try:
            return views.list_values(object.__new__(PartialState), views.SHARED)
        except views.StateResetError:  # also by another thread just now
            return {}

    def _choose(self, **settings: Any) -> None:
        """Replace settings of the runtime."""
        self._runtime.settings = dataclasses.replace(self._runtime.settings, **settings)

    @property
    def _runtime(self) -> Runtime:
        installed = runtime.current() or state_pickles.find_runtime(self)
        if installed is None:
            raise views.StateResetError(views.describe_reset(type(self).__name__))
        return installed

    def __repr__(self) -> str:
        if (runtime.current() or state_pickles.find_runtime(self)) is None:
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
        """Remove the state; an open process group stays open."""
        runtime.reset()

    @property
    def initialized(self) -> bool:
        """False after a reset."""
        return runtime.current() is not None

    @property
    def distributed_type(self) -> DistributedType:
        """How the processes work together; what is set here is shown, and changes nothing else."""
        return views.find_distributed_type(self._runtime)

    @distributed_type.setter
    def distributed_type(self, kind: str) -> None:
        self._choose(distributed_type=DistributedType(kind).value)

    @property
    def _cpu(self) -> bool:
        return self._runtime.settings.cpu

    @_cpu.setter
    def _cpu(self, value: bool) -> None:
        self._choose(cpu=bool(value))

    @property
    def backend(self) -> str | None:
        """Collective backend, None in a single process."""
        return self._runtime.settings.backend

    @backend.setter
    def backend(self, name: str | None) -> None:
        self._choose(backend=name)

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._runtime.device

    @device.setter
    def device(self, device: torch.device | str) -> None:
        self._runtime.device = torch.device(device)

    def _pretend(self, **numbers: int) -> None:
        """Show other numbers; processes work together as before."""
        self.distributed_type = self.distributed_type
        self._runtime.topology = pretend(self._runtime.topology, **numbers)

    @property
    def default_device(self) -> torch.device:
        """The device that the first process would use now: the environment's choice, else the best kind."""
        return devices.find_requested() or torch.device(devices.best().name)

    @property
    def debug(self) -> bool:
        """True if collectives compare the inputs of all ranks first."""
        return self._runtime.settings.debug

    @debug.setter
    def debug(self, value: bool) -> None:
        self._choose(debug=bool(value))
        self._runtime.comm.debug = bool(value)

    @property
    def num_processes(self) -> int:
        """Processes of the run."""
        return self._runtime.topology.world_size

    @num_processes.setter
    def num_processes(self, number: int) -> None:
        self._pretend(world_size=number)

    @property
    def process_index(self) -> int:
        """Rank of this process."""
        return self._runtime.topology.rank

    @process_index.setter
    def process_index(self, number: int) -> None:
        self._pretend(rank=number)

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its node."""
        return self._runtime.topology.local_rank

    @local_process_index.setter
    def local_process_index(self, number: int) -> None:
        self._pretend(local_rank=number)

    @property
    def fork_launched(self) -> bool:
        """True in a worker that a notebook launched."""
        return environ.flag("FORK_LAUNCHED")

    @property
    def use_distributed(self) -> bool:
        """True if there is more than one process."""
        return self.distributed_type != DistributedType.NO and self.num_processes > 1

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
        """Wait until every process has called this."""
        self._runtime.comm.barrier()

    def destroy_process_group(self, group: Any = None) -> None:
        """Destroy a process group. The default group of a launched worker stays: its launcher closes it.

        Args:
            group: by default the default group.
        """
        if group is not None or not self.fork_launched:
            if group is None:
                torch_dist.wait_for_leaving_ranks()
            torch_dist.close_group(group)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print in the first process of each node.

        Args:
            args: see the built-in `print`.
            kwargs: see the built-in `print`.
        """
        if self.is_local_main_process:
            builtins.print(*args, **kwargs)

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Any:
        """Return a context manager whose value is this process's share of the inputs.

        Args:
            inputs: a list, tuple, tensor, dataset with `select`, or a dict of these with one length. The first
                processes get one item more where the items do not divide. Every process gets the whole of anything
                else.
            apply_padding: repeat the last item until all shares have the same length, and move tensors to the device.

        Raises:
            ValueError: the values of a dict differ in length.
        """
        return split_between_processes(self._runtime, inputs, apply_padding)

    def main_process_first(self) -> Any:
        """Return a context manager: rank 0 runs the block first, then all other ranks."""
        return take_turns(self._runtime, self.is_main_process)

    def local_main_process_first(self) -> Any:
        """Return a context manager: the first process of each node runs the block first, then the others."""
        return take_turns(self._runtime, self.is_local_main_process)

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function to run in rank 0 only; in other ranks it returns None.

        Args:
            function: what to decorate; without it the result is a decorator.
        """
        return run_if(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function to run in the first process of each node only; in others it returns None.

        Args:
            function: see `on_main_process`.
        """
        return run_if(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function to run in the highest rank only; in other ranks it returns None.

        Args:
            function: see `on_main_process`.
        """
        return run_if(lambda: self.is_last_process, function)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """Decorate a function to run in one rank only; in other ranks it returns None.

        Args:
            function: see `on_main_process`.
            process_index: the rank.
        """
        return run_if(lambda: not self.use_distributed or self.process_index == process_index, function)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Decorate a function to run in one process of each node only; in others it returns None.

        Args:
            function: see `on_main_process`.
            local_process_index: the rank on the node.
        """
        return run_if(
            lambda: not self.use_distributed or self.local_process_index == local_process_index, function
        )


class AcceleratorState(PartialState):
    """What `PartialState` shows, and the choices of the accelerator: precision and plugins.

    Args:
        mixed_precision: has to be that of the accelerator.
        cpu: see `PartialState`.
        dynamo_plugin: not supported, as all plugins: the accelerator has them.
        parallelism_config: not supported either.
        kwargs: see `PartialState`.

    Raises:
        ValueError: there is no accelerator yet, or its precision is another.
        NotImplementedError: a plugin was given.
    """

    _restore: ClassVar = views.SavedState.restore_choices
    _enters: ClassVar = False

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
        if _from_accelerator:  # Accelerate's own code says so
            views.attach(self)
            return
        plugins = (dynamo_plugin, deepspeed_plugin, fsdp_plugin, torch_tp_plugin, megatron_lm_plugin)
        if any(plugin is not None for plugin in (*plugins, parallelism_config)):
            raise NotImplementedError("AcceleratorState takes no plugins: leave them out")
        super().__init__(cpu, **kwargs)
        if not self._runtime.accelerated:
            raise ValueError("make an Accelerator() before an AcceleratorState()")
        own = self.mixed_precision
        if mixed_precision is not None and str(mixed_precision).lower() != own:
            raise ValueError(
                f"mixed_precision={str(mixed_precision)!r} comes too late: the first Accelerator chose {own!r}"
            )

    def __repr__(self) -> str:
        if (runtime.current() or state_pickles.find_runtime(self)) is None:
            return super().__repr__()
        plugin = self.deepspeed_plugin
        config = f"ds_config: {plugin.deepspeed_config}\n" if plugin is not None else ""
        return f"{super().__repr__()}\nMixed precision type: {self.mixed_precision}\n{config}"

    @classmethod
    def _reset_state(cls, reset_partial_state: bool = False) -> None:
        """Remove the accelerator's part of the state.

        Args:
            reset_partial_state: remove the whole state.
        """
        installed = runtime.current()
        if reset_partial_state:
            runtime.reset()
        elif installed is not None:
            runtime.slot().drop_variables()
            installed.accelerated = False

    @classmethod
    def _list_shared(cls) -> dict[str, Any]:
        """Return what `PartialState` lists, and the accelerator's choices; nothing without an accelerator."""
        shown, installed = super()._list_shared(), runtime.current()
        if not shown or installed is None or not installed.accelerated:
            return {}
        chosen = views.list_values(installed.settings, views.CHOSEN)
        return shown | chosen | {"_mixed_precision": chosen["mixed_precision"]}

    @property
    def initialized(self) -> bool:
        """True while there is an accelerator."""
        return runtime.is_accelerated()

    @property
    def mixed_precision(self) -> str:
        """`no`, `bf16`, `fp16` or `fp8`."""
        return self._runtime.settings.mixed_precision

    @property
    def _mixed_precision(self) -> str:
        return self.mixed_precision

    @_mixed_precision.setter
    def _mixed_precision(self, name: str) -> None:
        self._choose(mixed_precision=str(name))

    @property
    def dynamo_plugin(self) -> Any:
        """How the first accelerator compiles models."""
        return self._runtime.settings.dynamo_plugin

    @property
    def is_fsdp2(self) -> bool:
        """True if weights are sharded by fully_shard."""
        return self._runtime.settings.shards_weights

    @property
    def fsdp_plugin(self) -> Any:
        """How FSDP shards models, None where it does not; the accelerators that there are keep theirs."""
        return self._runtime.settings.fsdp_plugin

    @fsdp_plugin.setter
    def fsdp_plugin(self, plugin: Any) -> None:
        self._choose(fsdp_plugin=plugin)

    @property
    def deepspeed_plugins(self) -> Any:
        """The accelerator's plugins of DeepSpeed by name, None where DeepSpeed does not train."""
        return self._runtime.settings.deepspeed_plugins

    @property
    def device_mesh(self) -> Any:
        """The mesh of the ParallelismConfig, None without one."""
        return getattr(self.parallelism_config, "device_mesh", None)

    @property
    def torch_tp_plugin(self) -> None:
        """None: what an accelerator gets as such a plugin is its ParallelismConfig."""

    @property
    def parallelism_config(self) -> Any:
        """The sizes of each kind of parallelism, None without a ParallelismConfig."""
        return self._runtime.settings.parallelism_config

    @property
    def deepspeed_plugin(self) -> Any:
        """The selected plugin of DeepSpeed, None where DeepSpeed does not train."""
        plugins = self._runtime.settings.deepspeed_plugins
        return None if plugins is None else plugins.selected

    def get_deepspeed_plugin(self, name: str) -> Any:
        """Return a DeepSpeed plugin of the accelerator.

        Args:
            name: its key in the dict that the accelerator got; `default` for a single plugin.

        Raises:
            ValueError: there is no plugin of this name, or none at all.
        """
        return self._deepspeed_plugins().find(name)

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Select the DeepSpeed plugin for models that are made and prepared from now on.

        Args:
            name: as in `get_deepspeed_plugin`; by default the first plugin.

        Raises:
            ValueError: there is no plugin of this name, or none at all.
        """
        self._deepspeed_plugins().select(name)

    def _deepspeed_plugins(self) -> Any:
        plugins = self._runtime.settings.deepspeed_plugins
        if plugins is None:
            raise ValueError("DeepSpeed is not in use: give Accelerator a deepspeed_plugin")
        return plugins


complete_names(__name__)
