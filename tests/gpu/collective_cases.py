"""Cases of collectives, data loaders and objects, for one rank and more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from notebook_accel import Accelerator, DataLoaderConfiguration, utils
from notebook_accel.comm import torch_dist
from notebook_accel.data_loader.exchange import Exchange
from tests.gpu.cases import case, make


@case()
def place(folder: Path) -> None:
    accelerator = make()
    device = accelerator.device
    if device.type == "cuda":
        assert device.index == accelerator.local_process_index
        assert torch.cuda.current_device() == device.index, "NCCL uses the current device"
    if accelerator.num_processes > 1:
        assert device.type in torch_dist.group_backend() or device.type == "cpu"
        assert "gloo" in torch_dist.group_backend(), "objects and offloaded gradients go by gloo"
    if device.type == "cuda" and accelerator.num_processes > 1:
        group = dist.distributed_c10d._get_default_group()
        assert group.bound_device_id == device
        numbers = accelerator.gather(torch.tensor([device.index], device=device))
        assert numbers.tolist() == list(range(accelerator.num_processes)), "each rank has a GPU of its own"


@case()
def gather_and_reduce(folder: Path) -> None:
    accelerator = make()
    rank, size, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32)
    others = (torch.int16, torch.uint16, torch.uint8, torch.bool, torch.complex64)
    for dtype in (*dtypes, *others):
        mine = torch.full((2, 3), rank + 1, device=device).to(dtype)
        expected = torch.cat([torch.full((2, 3), other + 1).to(dtype) for other in range(size)])
        for _ in range(3):  # the way of the third time is another one
            found = accelerator.gather({"a": mine, "b": [mine[0, 0], mine.T]})
            assert torch.equal(found["a"].cpu(), expected), dtype
            assert found["b"][0].shape == ((size,) if size > 1 else ()) and found["a"].device == device
    for dtype in dtypes:
        mine = torch.full((2,), rank + 1, device=device).to(dtype)
        total = size * (size + 1) / 2
        assert accelerator.reduce(mine, "sum").tolist() == [total] * 2
        assert accelerator.reduce(mine, "mean").tolist() == [total / size] * 2
        assert accelerator.reduce(mine, "max").tolist() == [size] * 2
    if size > 1:
        assert accelerator.gather(torch.full((1,), rank)).device.type == device.type, "it was on the CPU"


@case(ranks=2)
def broadcast_and_pad(folder: Path) -> None:
    accelerator = make()
    rank, size, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    tree = {"x": torch.full((3,), float(rank), device=device), "y": [torch.full((2,), rank, device=device)]}
    found = utils.broadcast(tree, from_process=size - 1)
    assert found["x"].tolist() == [size - 1] * 3 and tree["y"][0].tolist() == [size - 1] * 2, "in place"
    padded = accelerator.pad_across_processes(torch.ones(2, rank + 1, device=device), dim=1, pad_index=-1)
    assert padded.shape == (2, size) and int((padded == -1).sum()) == 2 * (size - 1 - rank)
    assert accelerator.gather(padded).shape == (2 * size, size)


@case(ranks=2)
def objects_and_barriers(folder: Path) -> None:
    accelerator = make()
    rank, size = accelerator.process_index, accelerator.num_processes
    assert utils.gather_object([{"rank": rank}]) == [{"rank": other} for other in range(size)]
    on_device = utils.gather_object([torch.full((1,), rank, device=accelerator.device)])
    assert [int(item) for item in on_device] == list(range(size))
    assert utils.broadcast_object_list([rank, "text"], from_process=1) == [1, "text"]
    with accelerator.main_process_first():
        if accelerator.is_main_process:
            (folder / "first").write_text("here")
        assert (folder / "first").is_file()
    with accelerator.split_between_processes(list(range(5)), apply_padding=True) as part:
        assert len(part) == -(-5 // size)
    assert not accelerator.check_trigger()
    if rank == size - 1:
        accelerator.set_trigger()
    assert accelerator.check_trigger()
    accelerator.wait_for_everyone()


@case()
def metrics_over_uneven_batches(folder: Path) -> None:
    accelerator = make()
    loader = accelerator.prepare(DataLoader(list(range(17)), batch_size=4))
    seen = torch.cat([accelerator.gather_for_metrics(batch) for batch in loader])
    assert seen.device == accelerator.device and sorted(seen.tolist()) == list(range(17))


@case(ranks=2)
def inputs_that_end_early(folder: Path) -> None:
    accelerator = make(dataloader_config=DataLoaderConfiguration(even_batches=False))
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    loader = accelerator.prepare(DataLoader(torch.arange(10.0)[:, None], batch_size=2))
    count = 0
    with accelerator.join_uneven_inputs([model]):
        for batch in loader:
            accelerator.backward(model(batch).sum())
            count += 1
    counts = utils.gather_object([count])
    assert sum(counts) == 5 and len(set(counts)) == 2, counts


def _epochs(accelerator: Accelerator, loader: Any) -> list[torch.Tensor]:
    found = []
    for _ in range(2):
        batches = [accelerator.gather_for_metrics(batch["x"]) for batch in loader]
        found.append(torch.cat(batches).cpu())
    return found


@case(ranks=2)
def dispatched_batches(folder: Path) -> None:
    sent: list[int] = []
    announce = Exchange._announce

    def note(self: Exchange, kind: int, *args: Any, **kwargs: Any) -> None:
        sent.append(kind)
        announce(self, kind, *args, **kwargs)

    config = DataLoaderConfiguration(dispatch_batches=True, non_blocking=True)
    accelerator = make(dataloader_config=config)
    rows = [{"x": torch.full((3,), float(number)), "y": number} for number in range(16)]
    loader = accelerator.prepare(DataLoader(rows, batch_size=2, pin_memory=accelerator.device.type == "cuda"))
    Exchange._announce = note  # type: ignore[method-assign]
    try:
        batches = list(loader)
    finally:
        Exchange._announce = announce  # type: ignore[method-assign]
    assert {batch["x"].device for batch in batches} == {accelerator.device}
    assert len({batch["x"].data_ptr() for batch in batches}) == len(batches), "batches that are kept stay"
    if accelerator.is_main_process:
        packed, new_structure, pickled = 0, 1, 2
        rounds = len(batches)
        assert sent[:rounds] == [new_structure] + [packed] * (rounds - 1), "numbers travel as tensors"
        assert sent.count(pickled) <= 1, "the end"
    for epoch in _epochs(accelerator, loader):
        assert sorted(epoch[:, 0].tolist()) == list(range(16))


@case(ranks=2)
def random_states_of_rank_0(folder: Path) -> None:
    accelerator = make()
    torch.manual_seed(accelerator.process_index)
    kind = accelerator.device.type
    utils.synchronize_rng_states(["torch", *(["cuda"] if kind == "cuda" else [])])
    drawn = accelerator.gather(torch.rand(1, 4, device=accelerator.device))
    assert torch.equal(drawn[0], drawn[1])
