"""Sharded models on an accelerator of which the package has no row: with one process, and with two."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from notebook_accel import Accelerator, ParallelismConfig
from notebook_accel.comm.torch_dist import open_group_of_one
from notebook_accel.fsdp import FullyShardedDataParallelPlugin
from notebook_accel.utils import broadcast, merge_fsdp_weights, synchronize_rng_states
from tests.unit import fake_cases, fake_device, gpt

STEPS = 2


def plugin(**options: Any) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP", **options
    )


def own_device() -> torch.device:
    return torch.device("fake", int(os.environ.get("LOCAL_RANK", "0")))


def train(accelerator: Accelerator, shares: int = 1) -> tuple[Any, list[float]]:
    """Return the prepared model and the losses of a few steps on batches of 8 for all processes together."""
    torch.manual_seed(0)
    model: Any = gpt.GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for batch in accelerator.prepare(gpt.loader(8 // shares, STEPS * shares)):
        loss = gpt.loss_of(model, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return model, losses


def expected() -> list[float]:
    """Return the losses of one process on the CPU."""
    torch.manual_seed(0)
    model = gpt.GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _, batch in zip(range(STEPS), gpt.loader(8, STEPS), strict=False):
        loss = gpt.loss_of(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def case_shards_of_one_process(folder: Path) -> None:
    accelerator = Accelerator(fsdp_plugin=plugin())
    assert str(torch.distributed.get_backend_config()) == "cpu:gloo,fake:fccl"
    model, losses = train(accelerator)
    assert losses == pytest.approx(expected(), rel=1e-4)
    assert {p.to_local().device for p in model.parameters()} == {torch.device("fake:0")}


def case_a_group_of_one_takes_tensors_of_both(folder: Path) -> None:
    open_group_of_one(torch.device("fake:0"))
    for device in ("fake:0", "cpu"):
        torch.distributed.all_reduce(torch.ones(2, device=device))


def case_inputs_are_kept_in_pinned_memory(folder: Path) -> None:
    options = {"activation_checkpointing": True, "activation_checkpointing_offload": True}
    accelerator = Accelerator(fsdp_plugin=plugin(**options))
    copies = fake_device.installed().copies.seen
    del copies[:]
    _, losses = train(accelerator)
    assert losses == pytest.approx(expected(), rel=1e-4)
    kept = [copy for copy in copies if copy[:2] == ("fake:0", "cpu") and copy[3]]
    assert kept
    if torch.__version__ >= "2.13":  # earlier ones wait for the end of each copy
        assert all(is_left_to_run for _, _, is_left_to_run, _ in kept)


ALONE = fake_cases.cases_of(globals())


def case_two_parts_of_each_weight(folder: Path) -> None:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=2))
    model, losses = train(accelerator)
    assert losses == pytest.approx(expected(), rel=1e-3)
    assert {getattr(p, "to_local", lambda p=p: p)().device for p in model.parameters()} == {own_device()}


def case_a_mesh_of_copies_and_shards(folder: Path) -> None:
    config = ParallelismConfig(dp_shard_size=2)
    accelerator = Accelerator(parallelism_config=config, fsdp_plugin=plugin())
    _, losses = train(accelerator, shares=2)
    assert losses == pytest.approx(expected(), rel=1e-3)


def case_saved_in_the_background(folder: Path) -> None:
    accelerator = Accelerator(fsdp_plugin=plugin(state_dict_type="SHARDED_STATE_DICT"))
    model, _ = train(accelerator, shares=2)
    saved = accelerator.save_state(str(folder / "state"), async_save=True)
    if hasattr(saved, "wait"):
        saved.wait()
    accelerator.wait_for_everyone()
    wanted = accelerator.get_state_dict(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(str(folder / "state"))
    found = accelerator.get_state_dict(model)
    if accelerator.is_main_process:  # which alone gets whole weights
        assert wanted and all(torch.equal(found[name], wanted[name]) for name in wanted)
    merge_fsdp_weights(folder / "state" / "pytorch_model_fsdp_0", folder / "merged")
    if accelerator.is_main_process:
        merged = load_file(folder / "merged" / "model.safetensors")
        assert merged and all(torch.equal(merged[name], wanted[name].cpu()) for name in merged)


def case_random_states_of_the_devices(folder: Path) -> None:
    accelerator = Accelerator(rng_types=["fake"])
    torch.manual_seed(accelerator.process_index)
    synchronize_rng_states(["fake"])
    drawn = torch.rand(2, device=accelerator.device)
    assert torch.equal(broadcast(drawn.clone()), drawn)
    with pytest.raises(ValueError, match=r"rng_types \['abacus'\] are unknown, choose among .*fake"):
        Accelerator(rng_types=["abacus"])


TOGETHER = [case for case in fake_cases.cases_of(globals()) if case not in ALONE]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, fake_cases.Outcomes]:
    folder = tmp_path_factory.mktemp("fake")
    alone = fake_cases.run_cases(ALONE, folder)
    together = fake_cases.run_cases(TOGETHER, folder, world_size=2)
    return {case.__name__: alone if case in ALONE else together for case in [*ALONE, *TOGETHER]}


@pytest.mark.parametrize("case", [*ALONE, *TOGETHER], ids=lambda case: case.__name__.removeprefix("case_"))
def test_on_fakes(case: fake_cases.Case, outcomes: dict[str, fake_cases.Outcomes]) -> None:
    outcomes[case.__name__].check(case)
