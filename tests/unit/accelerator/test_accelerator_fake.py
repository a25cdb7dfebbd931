"""Two processes train and save, and three go on, with an accelerator of which the package has no row."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from notebook_accel import Accelerator, DataLoaderConfiguration
from notebook_accel.fsdp import FullyShardedDataParallelPlugin
from notebook_accel.state import AcceleratorState, DistributedType
from tests.unit import fake_cases, fake_device

RANKS = 2


def make(**options: Any) -> Accelerator:
    """Return an accelerator that takes nothing over from the one before it, but the process group."""
    AcceleratorState._reset_state()
    return Accelerator(**options)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def loader(count: int = 24, batch_size: int = 4) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(count, 4, generator=generator)
    return DataLoader(TensorDataset(data, torch.arange(count) % 3), batch_size=batch_size)


def own_device() -> torch.device:
    return torch.device("fake", int(os.environ["LOCAL_RANK"]))


def train(accelerator: Accelerator, model: Any, optimizer: Any, batches: Any) -> list[float]:
    losses = []
    for data, target in batches:
        with accelerator.autocast():
            loss = nn.functional.cross_entropy(model(data), target)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def train_alone(steps: int = 3) -> list[float]:
    """Return the losses of one process on the CPU that sees all batches."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for _, (data, target) in zip(range(steps), loader(batch_size=8), strict=False):
        loss = nn.functional.cross_entropy(model(data), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def case_each_process_has_its_own_device(folder: Path) -> None:
    accelerator = make()
    assert accelerator.device == own_device() and accelerator.num_processes == RANKS
    assert accelerator.distributed_type == DistributedType.MULTI_GPU
    assert fake_device.installed().current_device() == own_device().index
    assert torch.distributed.get_backend() == "fccl"
    model, batches = accelerator.prepare(network(), loader())
    assert {p.device for p in model.parameters()} == {own_device()}
    assert {t.device for batch in batches for t in batch} == {own_device()}


def case_the_processes_train_as_one(folder: Path) -> None:
    accelerator = make()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    assert train(accelerator, model, optimizer, batches) == pytest.approx(train_alone(), rel=1e-4)


def case_collectives(folder: Path) -> None:
    accelerator = make()
    rank, device = accelerator.process_index, accelerator.device
    own = torch.tensor([rank], device=device)
    assert accelerator.gather(own).tolist() == [0, 1] and accelerator.gather(own).device == device
    assert accelerator.reduce(own + 1).tolist() == [3] and own.tolist() == [rank]
    from notebook_accel.utils import broadcast, broadcast_object_list, gather_object

    assert broadcast({"a": own + 5}, 1)["a"].tolist() == [6]
    assert gather_object([{"rank": rank}]) == [{"rank": 0}, {"rank": 1}]
    assert broadcast_object_list([rank, "x"], 1) == [1, "x"]
    padded = accelerator.pad_across_processes(torch.ones(rank + 1, device=device))
    assert padded.shape == (2,) and padded.device == device
    accelerator.wait_for_everyone()
    with accelerator.main_process_first():
        pass
    accelerator.set_trigger() if rank else None
    assert accelerator.check_trigger()


def case_gathered_for_metrics(folder: Path) -> None:
    accelerator = make()
    batches = accelerator.prepare(loader(count=10))
    seen = [accelerator.gather_for_metrics((data.sum(1), target)) for data, target in batches]
    assert sum(len(target) for _, target in seen) == 10
    assert {tensor.device for pair in seen for tensor in pair} == {own_device()}


def case_rank_0_reads_for_all(folder: Path) -> None:
    config = DataLoaderConfiguration(dispatch_batches=True)
    accelerator = make(dataloader_config=config)
    batches = accelerator.prepare(loader())
    assert {t.device for batch in batches for t in batch} == {own_device()}


def case_pinned_memory_is_copied_without_waiting(folder: Path) -> None:
    config = DataLoaderConfiguration(non_blocking=True)
    accelerator = make(dataloader_config=config)
    source = loader()
    pinned = DataLoader(source.dataset, batch_size=4, pin_memory=True)
    copies = fake_device.installed().copies.seen
    del copies[:]
    assert {t.device for batch in accelerator.prepare(pinned) for t in batch} == {own_device()}
    moved = [copy for copy in copies if copy[0] == "cpu"]
    assert moved and all(non_blocking and was_pinned for _, _, non_blocking, was_pinned in moved)


def watch_dtypes(layer: nn.Module) -> set[torch.dtype]:
    """Return a set that gets the dtypes of what the layer returns."""
    seen: set[torch.dtype] = set()
    layer.register_forward_hook(lambda _module, _args, output: seen.add(output.dtype))
    return seen


def case_mixed_precision(folder: Path) -> None:
    for mode, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        accelerator = make(mixed_precision=mode)
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
        dtypes = watch_dtypes(accelerator.unwrap_model(model)[0])
        assert train(accelerator, model, optimizer, batches) == pytest.approx(train_alone(), rel=0.1)
        assert dtypes == {dtype}
        if mode == "fp16":
            assert accelerator.scaler is not None and accelerator.scaler.get_scale() > 1


def case_an_overflow_skips_the_step(folder: Path) -> None:
    accelerator = make(mixed_precision="fp16")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    assert accelerator.scaler is not None
    scale = accelerator.scaler.get_scale()
    accelerator.backward(model(torch.ones(2, 4, device=accelerator.device)).sum() * float("inf"))
    optimizer.step()
    assert optimizer.step_was_skipped and accelerator.scaler.state_dict()["scale"] < scale
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))


def sharding(**options: Any) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP", **options)


def check_sharded(accelerator: Accelerator, place: torch.device) -> None:
    """Check that parts of weights and of an optimizer's states stay where they are, and train as one process does."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    assert {p.to_local().device for p in model.parameters()} == {place}
    assert train(accelerator, model, optimizer, batches) == pytest.approx(train_alone(), rel=1e-4)
    assert {p.to_local().device for p in model.parameters()} == {place}
    moments = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    assert {t.to_local().device for t in moments} == {place}


def case_fsdp(folder: Path) -> None:
    check_sharded(make(fsdp_plugin=sharding()), own_device())


def case_fsdp_with_weights_on_the_cpu(folder: Path) -> None:
    check_sharded(make(fsdp_plugin=sharding(cpu_offload=True)), torch.device("cpu"))


def case_fsdp_gives_the_memory_of_whole_weights_back(folder: Path) -> None:
    accelerator = make(fsdp_plugin=sharding())
    used = fake_device.installed().memory_allocated
    before = used()
    torch.manual_seed(0)
    model = accelerator.prepare(nn.Sequential(nn.Linear(64, 64, bias=False)))
    assert used() - before == 64 * 64 * 4 // RANKS
    model(torch.ones(2, 64, device=accelerator.device)).sum().backward()
    assert used() - before == 2 * 64 * 64 * 4 // RANKS, "weights and gradients"


def case_states(folder: Path) -> None:
    for name, options in (("ddp", {}), ("fsdp", {"fsdp_plugin": sharding()})):
        accelerator = make(**options)
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
        train(accelerator, model, optimizer, batches)
        torch.manual_seed(100 + accelerator.process_index)
        torch.rand(3, device=accelerator.device)
        accelerator.save_state(str(folder / name))
        after = torch.rand(3, device=accelerator.device).cpu()
        losses = train(accelerator, model, optimizer, batches)
        torch.manual_seed(0)
        accelerator.load_state(str(folder / name))
        assert torch.equal(after, torch.rand(3, device=accelerator.device).cpu())
        assert train(accelerator, model, optimizer, batches) == pytest.approx(losses)


def case_three_processes_go_on(folder: Path) -> None:
    """The third has no random states in the checkpoint: it gets some of its own, always the same."""
    accelerator = make()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    draws = []
    for _ in range(2):
        accelerator.load_state(str(folder.parent / case_states.__name__ / "ddp"))
        draws.append(accelerator.gather(torch.rand(1, device=accelerator.device)).tolist())
    assert draws[0] == draws[1] and len(set(draws[0])) == 3


CASES = fake_cases.cases_of(globals())
LATER = [case_three_processes_go_on]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, fake_cases.Outcomes]:
    folder = tmp_path_factory.mktemp("fake")
    first = [case for case in CASES if case not in LATER]
    found = fake_cases.run_cases(first, folder, world_size=RANKS)
    later = fake_cases.run_cases(LATER, folder, world_size=RANKS + 1)
    return {case.__name__: later if case in LATER else found for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("case_"))
def test_on_fakes(case: fake_cases.Case, outcomes: dict[str, fake_cases.Outcomes]) -> None:
    outcomes[case.__name__].check(case)
