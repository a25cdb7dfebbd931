"""Precision, spreading, accumulation, clipping and torch's operations on lists, in combination, on four processes.

Every pair of values occurs in a cell; with MATRIX=all in the environment every combination is one. A cell trains on one
process and on four. Both save before the last step, and each loads the other's checkpoint and takes the last step once
more. Losses are those of one process in the same precision.
"""

from __future__ import annotations

import gc
import itertools
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from notebook_accel import Accelerator, ParallelismConfig, dtensors, probes
from notebook_accel.fp8 import AORecipeKwargs
from notebook_accel.fsdp import FullyShardedDataParallelPlugin
from notebook_accel.handlers import GradScalerKwargs
from notebook_accel.state import AcceleratorState
from tests.unit import gpt, matrix
from tests.unit.multiprocess import run_worlds

BATCH = 8
STEPS = 3
LARGEST_NORM = 0.5  # below that of all steps
IGNORED = r"places|blocks\.0\.norm2"
# Relative. float32 adds up in another order; bfloat16 has 8 bits of mantissa, float16 11
TOLERANCE = {"no": 1e-5, "bf16": 2**-8, "fp16": 2**-11, "fp8": 2**-7}
SPREADS = ("ddp", "fsdp", "tp", "fsdp x tp", "hsdp", "ignored", "offload")
VALUES: dict[str, tuple[Any, ...]] = {
    "precision": ("no", "bf16", "fp16", "fp8"),
    "spread": SPREADS,
    "accumulate": (1, 3),
    "clip": (True, False),
    "lists": ("foreach", "fused", "none"),
}


@dataclass(frozen=True)
class Cell:
    precision: str
    spread: str
    accumulate: int
    clip: bool
    lists: str

    @property
    def name(self) -> str:
        words = [self.precision, self.spread, f"accumulate {self.accumulate}"]
        return ", ".join(words + ["clipped"] * self.clip + [self.lists])


def choose_cells() -> list[Cell]:
    """Return cells so that each pair of values is in one of them: always the cell with most new pairs; or all."""
    names = list(VALUES)
    precisions = [name for name in VALUES["precision"] if name != "fp8" or probes.is_available("torchao")]
    every = [
        Cell(**dict(zip(names, values, strict=True)))
        for values in itertools.product(precisions, *list(VALUES.values())[1:])
    ]

    if matrix.TRIES_ALL:
        return every

    def pairs(cell: Cell) -> set[Any]:
        return set(itertools.combinations(vars(cell).items(), 2))

    missing = set().union(*map(pairs, every))
    chosen = []
    while missing:
        best = max(every, key=lambda cell: len(pairs(cell) & missing))
        missing -= pairs(best)
        chosen.append(best)
    return chosen


def spread(how: str) -> dict[str, Any]:
    """Return arguments of Accelerator."""
    sizes = {
        "tp": {"tp_size": 4},
        "fsdp x tp": {"dp_shard_size": 2, "tp_size": 2},
        "hsdp": {"dp_replicate_size": 2, "dp_shard_size": 2},
    }
    options = {"ignored": {"ignored_modules": IGNORED}, "offload": {"cpu_offload": True}}
    if how == "ddp":
        return {}
    found: dict[str, Any] = {}
    if how in sizes:
        found["parallelism_config"] = ParallelismConfig(**sizes[how])  # type: ignore[arg-type]
    if how != "tp":
        found["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP", **options.get(how, {})
        )
    return found


def build(cell: Cell, **options: Any) -> tuple[Accelerator, Any, Any]:
    AcceleratorState._reset_state()
    # the weights travel in float8 where they are clipped, so that both ways are tried
    handlers = [AORecipeKwargs(enable_fsdp_float8_all_gather=cell.clip)] if cell.precision == "fp8" else []
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=cell.precision,
        gradient_accumulation_steps=cell.accumulate,
        kwargs_handlers=[GradScalerKwargs(init_scale=1024.0), *handlers],
        **options,
    )
    torch.manual_seed(0)
    model = gpt.GPT(layers=1)
    lists = {"foreach": cell.lists == "foreach", "fused": cell.lists == "fused"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **lists)
    return accelerator, *accelerator.prepare(model, optimizer)


def count_shares(accelerator: Accelerator, cell: Cell) -> int:
    """Return how many processes see different batches."""
    if cell.spread == "ignored":  # gradients of ignored modules are not averaged: all see the same
        return 1
    config = accelerator.parallelism_config
    return accelerator.num_processes if config is None else config.data_parallel_size


def take_step(accelerator: Accelerator, model: Any, optimizer: Any, cell: Cell, number: int) -> float:
    """Take one step of the optimizer, and return the mean of its losses over all processes."""
    shares = count_shares(accelerator, cell)
    share = accelerator.process_index * shares // accelerator.num_processes  # neighbours split layers
    batches = list(gpt.loader(BATCH, STEPS * cell.accumulate))
    losses = []
    for batch in batches[number * cell.accumulate : (number + 1) * cell.accumulate]:
        part = [tensor.chunk(shares)[share] for tensor in batch]
        with accelerator.accumulate(model):
            loss = gpt.loss_of(model, part)
            accelerator.backward(loss)
            if cell.clip:
                norm = float(accelerator.clip_grad_norm_(model.parameters(), LARGEST_NORM))
                assert not accelerator.sync_gradients or norm > LARGEST_NORM
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return sum(losses) / len(losses)


def run_cell(cell: Cell, folder: str) -> list[float]:
    """Return the losses of all steps, and that of the last one after the checkpoint of one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="f.*=True of an optimizer has no effect")
        accelerator, model, optimizer = build(cell, **spread(cell.spread))
    losses = [take_step(accelerator, model, optimizer, cell, number) for number in range(STEPS - 1)]
    accelerator.save_state(f"{folder}/four/{cell.name}")
    losses.append(take_step(accelerator, model, optimizer, cell, STEPS - 1))
    assert not accelerator.optimizer_step_was_skipped
    accelerator.load_state(f"{folder}/one/{cell.name}")
    losses.append(take_step(accelerator, model, optimizer, cell, STEPS - 1))
    accelerator.free_memory()
    return losses


def run_alone(cell: Cell, folder: str) -> list[float]:
    """Return the losses of all steps on one process."""
    accelerator, model, optimizer = build(cell)
    losses = [take_step(accelerator, model, optimizer, cell, number) for number in range(STEPS - 1)]
    accelerator.save_state(f"{folder}/one/{cell.name}")
    return [*losses, take_step(accelerator, model, optimizer, cell, STEPS - 1)]


def agree_on_skipped_steps(cell: Cell) -> dict[str, Any]:
    """Let the gradients of one process overflow."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="f.*=True of an optimizer has no effect")
        accelerator, model, optimizer = build(cell, **spread(cell.spread))
    batch = next(iter(gpt.loader(BATCH, 1)))
    skipped = []
    for overflows in (True, False):
        accelerator.backward(gpt.loss_of(model, batch))
        if overflows and accelerator.process_index == 1:
            dtensors.to_local(model.blocks[0].up.weight.grad).fill_(float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
    scale = accelerator.scaler.get_scale() if accelerator.scaler else None
    accelerator.free_memory()
    return {"skipped": skipped, "scale": scale}


def convert_too_late() -> None:
    """Shard a model by hand, and ask for fp8 afterwards."""
    from torch.distributed.fsdp import fully_shard

    cell = Cell(precision="fp8", spread="fsdp", accumulate=1, clip=False, lists="none")
    accelerator, *_ = build(cell, **spread("fsdp"))
    sharded = fully_shard(gpt.GPT(layers=1))
    with pytest.raises(ValueError, match=r"weights that are sharded already \(FSDPGPT\)"):
        accelerator.prepare(sharded)
    accelerator.free_memory()


OVERFLOWING = [
    Cell(precision="fp16", spread=how, accumulate=1, clip=False, lists=lists)
    for how in SPREADS
    if how != "ddp"  # gradients are averaged over all processes, and an infinite value with them
    for lists in ("foreach", "fused")
]


def on_four(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for cell in choose_cells():
        found[cell.name] = run_cell(cell, folder)
        gc.freeze()  # collections of later cells need not go over what torch keeps
    found["overflows"] = {cell.name: agree_on_skipped_steps(cell) for cell in OVERFLOWING}
    if probes.is_available("torchao"):
        convert_too_late()
    return found


@pytest.mark.timeout(matrix.SECONDS + 60)
def test_combinations(clean_runtime: None, tmp_path: Any) -> None:
    cells = choose_cells()
    expected = {cell.name: run_alone(cell, str(tmp_path)) for cell in cells}
    modules = (
        ["torchao.float8"] if probes.is_available("torchao") else []
    )  # else each rank imports it for seconds
    (found,) = run_worlds(modules, on_four, [(4, (str(tmp_path),))], timeout=matrix.SECONDS)
    for cell in cells:
        close = {"rtol": TOLERANCE[cell.precision], "atol": 0.0, "msg": cell.name}
        wanted = [*expected[cell.name], expected[cell.name][-1]]
        for losses in (rank[cell.name] for rank in found):
            torch.testing.assert_close(losses, wanted, **close)  # type: ignore[arg-type]
        accelerator, model, optimizer = build(cell)
        accelerator.load_state(tmp_path / "four" / cell.name)
        resumed = take_step(accelerator, model, optimizer, cell, STEPS - 1)
        torch.testing.assert_close(resumed, wanted[-1], **close)  # type: ignore[arg-type]
    for rank in found:
        assert rank["overflows"] == {
            cell.name: {"skipped": [True, False], "scale": 512.0} for cell in OVERFLOWING
        }
