"""Collectives of the fake accelerator: gloo, which gets tensors of the process's own fake device and nothing else.

torch gives a collective to the kernel of its tensors' dispatch key. That of PrivateUse1 is here. It gives gloo views of
the same memory on the CPU. A group of this backend alone has none for the CPU, as with NCCL.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future

from notebook_accel.devices import kind_of
from tests.unit.fake_device import FakeModule
from tests.unit.fake_kernels import Kernels

BACKEND = "fccl"
_IN_THE_BACKGROUND = ("c10d::send", "c10d::recv_", "c10d::recv_any_source_")


class Groups:
    """The groups of this backend, and the kernels of their collectives.

    Args:
        module: the devices.
        kernels: those of the devices.
    """

    def __init__(self, module: FakeModule, kernels: Kernels) -> None:
        self.module = module
        self.kernels = kernels
        self._shadows: dict[str, Any] = {}  # groups that have gloo for the CPU, by name
        self._indices: dict[str, int] = {}  # of the device of each
        self.library = torch.library.Library("c10d", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has kernels for these already
            for schema in torch._C._jit_get_all_schemas():
                if schema.name.startswith("c10d::") and schema.name != "c10d::check_for_nan":
                    self._register(schema.name)

    def open(self, options: Any, _: Any) -> Any:
        """Return gloo for a new group; see `torch.distributed.Backend.register_backend`."""
        store, rank, size = options.store, options.group_rank, options.group_size
        shadow = dist.ProcessGroup(store, rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout=options.timeout)
        shadow._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        shadow._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._shadows[options.group_id] = shadow
        self._indices[options.group_id] = self.module.current_device()
        return gloo

    def _register(self, name: str) -> None:
        op = getattr(torch.ops.c10d, name.partition("::")[2]).default

        def run(*args: Any) -> Any:
            return self._run(op, args)

        self.library.impl(name.partition("::")[2], run, "PrivateUse1", allow_override=True)

    def _run(self, op: Any, args: tuple[Any, ...]) -> Any:
        place = next(
            at for at, argument in enumerate(op._schema.arguments) if argument.name == "process_group"
        )
        name = dist.ProcessGroup.unbox(args[place]).group_name
        lowered = [self._lower(one, name) for one in args]
        lowered[place] = self._shadows[name].boxed()
        found = op(*lowered)
        work = found[-1] if isinstance(found, (list, tuple)) else found
        if op._schema.name not in _IN_THE_BACKGROUND:
            dist.Work.unbox(work).wait()
            work = self._finished(args[0]).boxed()
        return (args[0], work) if isinstance(found, (list, tuple)) else work

    def _finished(self, written: Any) -> Any:
        future = torch.futures.Future[Any]()
        future.set_result(written if isinstance(written, (list, tuple)) else [written])
        return _create_work_from_future(future)

    def _lower(self, value: Any, name: str) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._lower(one, name) for one in value]
        if not isinstance(value, torch.Tensor):
            return value
        own = torch.device(self.module.name, self._indices[name])
        if value.device != own:
            raise ValueError(
                f"{BACKEND} of this process works on tensors of {own}, not on those of {value.device}"
            )
        return self.kernels.lower(value)


def install(module: FakeModule) -> None:
    """Register the backend for the devices of this process.

    Args:
        module: the devices.
    """
    module.groups = Groups(module, module.kernels)
    backend = BACKEND if module.name == "fake" else kind_of(module.name).backend
    dist.Backend.register_backend(backend, module.groups.open, extended_api=True, devices=[module.name])
