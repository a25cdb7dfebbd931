"""The accelerator's view of the run: which process this is, and code that only some processes run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import processes
from ..state import DistributedType
from .base import Shared


class ProcessPart(Shared):
    """Place in the run, and code that only some processes run; all of it is `PartialState`'s."""

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._runtime.device

    @property
    def distributed_type(self) -> DistributedType:
        """How the processes work together."""
        return self.state.distributed_type

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
    def is_main_process(self) -> bool:
        """True in rank 0."""
        return self._runtime.topology.is_main

    @property
    def is_local_main_process(self) -> bool:
        """True in the first process of each node."""
        return self._runtime.topology.is_local_main

    @property
    def is_last_process(self) -> bool:
        """True in the highest rank."""
        return self._runtime.topology.is_last

    @property
    def data_parallel_rank(self) -> int:
        """Rank among the copies of the model: every process has one, unless a mesh says otherwise."""
        return self._runtime.topology.rank if self._strategy.mesh is None else self._place("dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """Rank among the processes over which a mesh shards one copy of the model; 0 without a mesh."""
        return self._place("dp_shard")

    @property
    def tensor_parallel_rank(self) -> int:
        """Rank among the processes that share each layer; 0 where layers are not split."""
        return self._place("tp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """Rank among the stages of a pipeline: 0, since training has one stage."""
        return 0

    @property
    def context_parallel_rank(self) -> int:
        """Rank among the processes that share each sequence; 0 where sequences are not split."""
        return self._place("cp")

    def _place(self, dimension: str) -> int:
        mesh = self._strategy.mesh
        return int(mesh.get_local_rank(dimension)) if dimension in getattr(mesh, "mesh_dim_names", ()) else 0

    @property
    def use_distributed(self) -> bool:
        """True if there is more than one process."""
        return self._runtime.topology.world_size > 1

    @property
    def multi_device(self) -> bool:
        """True if there is more than one process, each with a device of its own: not on CPUs."""
        return self.use_distributed and self.device.type != "cpu"

    @property
    def should_stop(self) -> bool:
        """Whether the notebook asked the run to stop, see `Run.stop`: then save and return.

        All ranks should read it equally often, once a step for example: they get True at the same reading. It costs
        nothing, and no rank waits for the readings of others. Without a notebook it is always False.
        """
        return processes.should_stop()

    def wait_for_everyone(self) -> None:
        """Return when every process has called it."""
        self._runtime.comm.barrier()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print in the first process of each node."""
        self.state.print(*args, **kwargs)

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function to run in rank 0 only; elsewhere it returns None."""
        return self.state.on_main_process(function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function to run in the first process of each node only; elsewhere it returns None."""
        return self.state.on_local_main_process(function)

    def on_last_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function to run in the highest rank only; elsewhere it returns None."""
        return self.state.on_last_process(function)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """Decorate a function to run in one rank only; elsewhere it returns None.

        Args:
            function: what to decorate; without it a decorator is returned.
            process_index: the rank.
        """
        return self.state.on_process(function, process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Decorate a function to run in one process of each node only; elsewhere it returns None.

        Args:
            function: what to decorate; without it a decorator is returned.
            local_process_index: the rank on the node.
        """
        return self.state.on_local_process(function, local_process_index)

    def main_process_first(self) -> Any:
        """Return a context manager whose block rank 0 runs before all others do."""
        return self.state.main_process_first()

    def local_main_process_first(self) -> Any:
        """Return a context manager whose block the first process of each node runs before the others do."""
        return self.state.local_main_process_first()

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
        return self.state.split_between_processes(inputs, apply_padding)
