"""What workers of these tests run that concerns several ranks, refusals and threads."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch_xla
from torch.utils.data import DataLoader

from notebook_accel import Accelerator, runtime
from notebook_accel.comm import ops, xla
from notebook_accel.environ import patch_environment
from notebook_accel.local_sgd import LocalSGD
from notebook_accel.nested import flatten
from notebook_accel.runtime import Runtime
from notebook_accel.state import PartialState
from notebook_accel.topology import Topology
from tests.xla.programs import Stream, distance, row_data, small


class TwinComm(xla.XlaComm):
    """Rank 0 of two that do the same: devices of this kind on CPUs cannot wait for each other."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([super().all_gather(tensor)] * 2)

    def all_reduce(self, tensor: torch.Tensor, op: Any = "sum") -> torch.Tensor:
        reduced = super().all_reduce(tensor, op)
        return reduced.mul_(2) if op == "sum" else reduced


class CpuTwinComm(TwinComm):
    """The same on the CPU."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, tensor])

    def all_reduce(self, tensor: torch.Tensor, op: Any = "sum") -> torch.Tensor:
        return tensor.mul_(2) if op == "sum" else tensor


def _two_ranks() -> Accelerator:
    """Return an accelerator that is rank 0 of two."""
    found = xla.enter(spmd=False, local_rank=0, local_world_size=1)
    two = xla.Place(device=found.device, rank=0, world_size=2, local_rank=0, local_world_size=2)
    topology = Topology(rank=0, local_rank=0, world_size=2, local_world_size=2)
    feed = xla.XlaFeed(found)
    made = Runtime(topology=topology, device=found.device, comm=TwinComm(two), feed=feed)
    runtime.install(made)
    return Accelerator()


def several_ranks() -> dict[str, Any]:
    """Train as rank 0 of two, and gather what the last batch's fillers are cut from."""
    accelerator = _two_ranks()
    model = small()
    rows = row_data(13)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(rows, 4)
    )
    kept, sizes = [], []
    for inputs, targets in loader:
        accelerator.backward(distance(model(inputs), targets))
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        sizes.append(len(inputs))
        gathered = accelerator.gather_for_metrics({"rows": inputs, "number": targets[:, 0].long()})
        kept.append([len(gathered["rows"]), len(gathered["number"])])
    averaged = []
    with mock.patch.object(xla, "average") as average:
        for alone in (False, True, False):
            accelerator.backward(distance(model(inputs), targets))
            with LocalSGD(accelerator, model, 8) if alone else contextlib.nullcontext():
                optimizer.step()
            averaged.append(average.called)
            average.reset_mock()
    stream = accelerator.prepare(DataLoader(Stream(), 3))
    accelerator.wait_for_everyone()
    accelerator.set_trigger()
    return {
        "sizes": sizes,
        "kept": kept,
        "norm": float(norm),
        "averaged": averaged,
        "stream": [batch.cpu().tolist() for batch in stream],
        "objects": accelerator.gather_for_metrics([1, 2], use_gather_object=True),
        "trigger": accelerator.check_trigger(),
    }


def collectives() -> dict[str, Any]:
    """Compare what `ops` makes of trees on the device with what it makes of them on the CPU."""
    accelerator = _two_ranks()
    comm = accelerator._runtime.comm
    cpu = xla.Place(device=torch.device("cpu"), rank=0, world_size=2, local_rank=0, local_world_size=2)
    other = CpuTwinComm(cpu)
    tree = {
        "rows": torch.arange(6.0).reshape(3, 2),
        "whole": [torch.tensor([1, 2]), torch.tensor(7)],
        "truth": torch.tensor([True, False]),
        "half": torch.tensor([0.5, 2.0], dtype=torch.bfloat16),
    }
    numbers = {"rows": tree["rows"], "whole": tree["whole"]}
    plans: dict[str, tuple[Callable[..., Any], Any]] = {
        "gather": (ops.gather, tree),
        "gather again": (ops.gather, tree),
        "gather by layout": (ops.gather, tree),
        "broadcast": (ops.broadcast, tree),
        "reduce": (ops.reduce, numbers),
        "pad": (ops.pad_across_processes, numbers),
    }
    wrong = []
    for name, (operation, data) in plans.items():
        expected = operation(other, ops.nested.recursively_apply(torch.clone, data))
        found = operation(comm, ops.nested.send_to_device(data, comm.device))
        pairs = zip(flatten(expected).leaves, flatten(found).leaves, strict=True)
        if not all(torch.equal(one, two.cpu()) and one.dtype == two.dtype for one, two in pairs):
            wrong.append(name)
    nan = torch.tensor([float("nan"), 1.0]).to(comm.device)
    return {
        "wrong": wrong,
        "objects": comm.all_gather_object({"a": "x" * 1000}) == [{"a": "x" * 1000}] * 2,
        "not a number": [value == value for value in comm.broadcast(nan, 1).cpu().tolist()],
    }


def refusals() -> list[str]:
    """Ask for what cannot be."""
    said = []

    def ask(action: Callable[[], Any]) -> None:
        runtime.reset()
        try:
            action()
        except ValueError as error:
            said.append(str(error))

    def ask_with(**variables: str) -> None:
        with patch_environment(**variables):
            ask(Accelerator)

    ask(lambda: Accelerator(mixed_precision="fp16"))
    ask_with(accelerate_downcast_bf16="1")
    ask_with(notebook_accel_tpu_mode="other")
    ask_with(world_size="2", rank="0")
    return said


def downcast() -> dict[str, Any]:
    """Multiply what bfloat16 cannot tell from 1, in both formats."""
    accelerator = Accelerator(mixed_precision="bf16")
    device = accelerator.device
    single = torch.tensor([1.001]).to(device) * 3
    double = torch.tensor([1.001], dtype=torch.float64).to(device) * 3
    return {
        "single": single.item(),
        "double": double.item(),
        "dtypes": [str(single.dtype), str(double.dtype)],
    }


def threads() -> dict[str, Any]:
    """Run on every device of this process in a thread of its own."""
    pjrt = importlib.import_module("torch_xla._internal.pjrt")
    meeting = threading.Barrier(2)
    found: dict[int, Any] = {}

    def rank(index: int) -> None:
        accelerator = Accelerator(gradient_accumulation_steps=index + 1, mixed_precision="bf16")
        meeting.wait(60)  # both have theirs
        loader = accelerator.prepare(DataLoader(torch.arange(12), 3))
        batches = [batch.tolist() for batch in loader]
        meeting.wait(60)
        again = PartialState()
        found[index] = {
            "place": [again.process_index, again.num_processes, again.is_main_process],
            "device": str(again.device),
            "steps": accelerator.gradient_accumulation_steps,
            "batches": batches,
            "own": runtime.current() is accelerator._runtime,
        }
        meeting.wait(60)
        if index == 0:
            runtime.reset()
        meeting.wait(60)
        found[index]["left"] = runtime.current() is not None

    # as torch_xla.launch does where a process has several devices
    pjrt._run_thread_per_device(0, 1, lambda: rank(torch_xla.device().index), pjrt.initialize_multiprocess)
    return {"ranks": [found[0], found[1]], "outside": runtime.current() is not None}
