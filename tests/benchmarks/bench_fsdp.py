"""A training step with FSDP on two ranks beside fully_shard by hand, and preparing a model of 1,000 blocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.benchmarks.subprocesses import two_ranks
from tests.benchmarks.table import Row, compare, interleave
from tests.unit import gpt

STEPS = 6
ROUNDS = 12
BLOCKS = 1000
LIMIT_S = 5.0
BUILD = {"width": 128, "layers": 6}


def run() -> list[Row]:
    found = two_ranks("bench_fsdp:on_each_rank")
    prepared = {name.partition("/")[2]: taken for name, taken in found.items() if name.startswith("prepare/")}
    steps = {name: taken for name, taken in found.items() if "/" not in name}
    rows = compare("FSDP step, 2 processes", steps, {"fully_shard by hand": 1.05}, per=STEPS)
    rows += compare(f"prepare of {BLOCKS} blocks on meta", prepared, {f"{LIMIT_S:g} s": 1.0})
    return rows


def sharded_by_hand(model: gpt.GPT) -> gpt.GPT:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def epoch(model: Any, optimizer: Any, batches: list[Any], backward: Callable[[torch.Tensor], Any]) -> float:
    torch.distributed.barrier()
    started = time.perf_counter()
    for batch in batches:
        backward(gpt.loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - started


def prepare_on_meta(by_hand: bool, accelerator: Any) -> float:
    with torch.device("meta"):
        model = gpt.GPT(width=64, layers=BLOCKS)
    torch.distributed.barrier()
    started = time.perf_counter()
    if by_hand:
        sharded_by_hand(model)
    else:
        accelerator.prepare(model)
    taken = time.perf_counter() - started
    accelerator.free_memory()
    return taken


def on_each_rank() -> dict[str, list[float]]:
    from notebook_accel import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    batches = list(gpt.loader(8, STEPS))

    def parts() -> tuple[gpt.GPT, Callable[[nn.Module], torch.optim.Optimizer]]:
        torch.manual_seed(0)
        return gpt.GPT(**BUILD), lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)

    model, optimizer_of = parts()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    ours = partial(epoch, model, optimizer, batches, accelerator.backward)
    raw, optimizer_of = parts()
    raw = sharded_by_hand(raw)
    by_hand = partial(epoch, raw, optimizer_of(raw), batches, torch.Tensor.backward)
    found = interleave({"ours": ours, "fully_shard by hand": by_hand}, rounds=ROUNDS, warmup=3)
    contenders = {
        "prepare/ours": partial(prepare_on_meta, False, accelerator),
        "prepare/fully_shard by hand": partial(prepare_on_meta, True, accelerator),
    }
    found |= interleave(contenders, rounds=2, warmup=0)
    return found | {f"prepare/{LIMIT_S:g} s": [LIMIT_S] * 2}
