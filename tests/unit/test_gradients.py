"""Norms of gradients of which a process may hold nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from notebook_accel import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, gradients
from notebook_accel.state import AcceleratorState
from tests.unit import gpt
from tests.unit.multiprocess import run_ranks

NORMS = ("inf", 2, 1)
SPREADS = (
    {"dp_shard_size": 4},
    {"dp_replicate_size": 2, "dp_shard_size": 2},
    {"dp_shard_size": 2, "tp_size": 2},
)


class Scaled(gpt.GPT):
    """A GPT with a weight of one row, of which most processes hold nothing."""

    def __init__(self) -> None:
        super().__init__(layers=1, width=32)
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.factor


def measure_norms() -> list[list[float]]:
    found = []
    for sizes in SPREADS:
        AcceleratorState._reset_state()
        accelerator = Accelerator(
            cpu=True,
            fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
            parallelism_config=ParallelismConfig(**sizes),
        )
        torch.manual_seed(0)
        model = accelerator.prepare(Scaled())
        accelerator.backward(gpt.loss_of(model, next(iter(gpt.loader(2, 1)))))
        norms = [accelerator.clip_grad_norm_(model.parameters(), 1e9, kind) for kind in NORMS]  # type: ignore[arg-type]
        found.append([float(norm) for norm in norms])
    return found


def test_norms_where_a_process_has_no_part_of_a_weight() -> None:
    torch.manual_seed(0)
    model = Scaled()
    gpt.loss_of(model, next(iter(gpt.loader(2, 1)))).backward()
    values = torch.cat([item.grad.flatten() for item in model.parameters() if item.grad is not None])
    wanted = [float(torch.linalg.vector_norm(values, float(kind))) for kind in NORMS]
    for rank in run_ranks(measure_norms, world_size=4):
        for norms in rank:
            torch.testing.assert_close(norms, wanted, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("kind", [*NORMS, 0, float("-inf")])
def test_norm_beside_an_empty_weight(kind: float) -> None:
    weights = [torch.zeros(2), torch.zeros(0, 3)]
    for weight in weights:
        weight.grad = torch.full_like(weight, 3.0)
    wanted = torch.nn.utils.get_total_norm([torch.full((2,), 3.0)], float(kind))
    torch.testing.assert_close(gradients.measure_norm(weights, kind), wanted)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_gradients_are_unscaled_whatever_the_default_dtype_is(default: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        kept = [torch.tensor([2.0, 4.0]), torch.tensor([float("inf")], dtype=torch.float32)]
        found = [float(gradients.unscale([each], torch.tensor(0.5, dtype=torch.float32))) for each in kept]
    finally:
        torch.set_default_dtype(before)
    assert found == [0.0, 1.0] and kept[0].tolist() == [1.0, 2.0]
