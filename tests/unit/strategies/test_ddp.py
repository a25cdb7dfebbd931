"""Hooks that compress gradients: every one on two gloo processes, beside plain data parallelism and Accelerate."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

from notebook_accel.accelerator import Accelerator
from notebook_accel.handlers import DDPCommunicationHookType, DistributedDataParallelKwargs
from tests.unit.multiprocess import do_without_deepspeed, run_ranks

CHOICES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp16": {"comm_hook": "fp16"},
    "power_sgd": {
        "comm_hook": "power_sgd",
        "comm_state_option": {"start_powerSGD_iter": 2, "matrix_approximation_rank": 8},
    },
    "wrapped": {
        "comm_hook": "power_sgd",
        "comm_wrapper": "fp16",
        "comm_state_option": {"start_powerSGD_iter": 2, "matrix_approximation_rank": 8},
    },
}  # fmt: skip


def train(accelerator: Any) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    generator = torch.Generator().manual_seed(accelerator.process_index)
    for _ in range(4):
        x, y = torch.randn(4, 8, generator=generator), torch.randn(4, 8, generator=generator)
        accelerator.backward(mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


def ranks_ours() -> tuple[dict[str, list[float]], list[Any]]:
    found = {}
    for name, options in CHOICES.items():
        chosen = {
            key: DDPCommunicationHookType(value) if isinstance(value, str) else value
            for key, value in options.items()
        }
        found[name] = train(Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(**chosen)]))
    return found, refused()


def ranks_theirs() -> dict[str, list[float]]:
    from accelerate import Accelerator as Theirs
    from accelerate import DDPCommunicationHookType as TheirHook
    from accelerate import DistributedDataParallelKwargs as TheirKwargs

    do_without_deepspeed()
    found = {}
    for name, options in CHOICES.items():
        chosen = {
            key: TheirHook(value) if isinstance(value, str) else value for key, value in options.items()
        }
        found[name] = train(Theirs(cpu=True, kwargs_handlers=[TheirKwargs(**chosen)]))
    return found


def test_every_hook_trains_as_without_it_or_is_refused() -> None:
    (first, messages), (second, others) = run_ranks(ranks_ours)
    assert messages == others
    alone, wrapped, batched = messages
    if not torch.distributed.is_nccl_available():  # a torch that has NCCL takes bf16 for gloo too
        assert "comm_hook 'bf16' with comm_wrapper 'no' does not work with this backend, gloo" in alone
        assert "comm_hook 'power_sgd' with comm_wrapper 'bf16'" in wrapped and "fp16 compresses" in wrapped
    assert batched == 144 or "as soon as it compresses, after start_powerSGD_iter steps" in batched
    theirs = run_ranks(ranks_theirs)[0]
    for name, weights in first.items():
        assert weights == pytest.approx(second[name]), f"{name}: ranks differ"
        tolerance = {"plain": 0.0, "fp16": 1e-3}.get(name, 5e-2)
        assert weights == pytest.approx(first["plain"], rel=0, abs=tolerance), name
        assert weights == pytest.approx(theirs[name], rel=0, abs=1e-6), f"{name}: Accelerate differs"
        if name != "plain":
            assert weights != first["plain"], f"{name}: the hook did nothing"


def refused() -> list[Any]:
    messages: list[Any] = []
    for hook, wrapper in (("bf16", "no"), ("power_sgd", "bf16")):
        options = DistributedDataParallelKwargs(
            comm_hook=DDPCommunicationHookType(hook), comm_wrapper=DDPCommunicationHookType(wrapper)
        )
        try:
            Accelerator(kwargs_handlers=[options]).prepare(torch.nn.Linear(1, 1))
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    batched = DistributedDataParallelKwargs(
        comm_hook=DDPCommunicationHookType.BATCHED_POWER_SGD, comm_state_option={"start_powerSGD_iter": 2}
    )
    try:
        messages.append(len(train(Accelerator(kwargs_handlers=[batched]))))
    except ValueError as error:  # in a torch where it works, it trains
        messages.append(str(error))
    return messages


def test_wrong_choices_are_explained() -> None:
    for options, sentence in (
        (
            {"comm_hook": "fp8"},
            "comm_hook 'fp8' is unknown, choose among no, fp16, bf16, power_sgd, batched_power_sgd",
        ),
        ({"comm_wrapper": "power_sgd"}, "comm_wrapper 'power_sgd' is unknown, choose among no, fp16, bf16"),
        ({"comm_state_option": [1]}, "comm_state_option is a dict"),
        (
            {"comm_hook": "power_sgd", "comm_state_option": {"rank": 1}},
            r"comm_state_option \['rank'\] .* torch's PowerSGDState",
        ),
    ):
        with pytest.raises((ValueError, TypeError), match=sentence):
            DistributedDataParallelKwargs(**options)  # type: ignore[arg-type]


def unfreeze_layer() -> tuple[str, float]:
    """Return what a forward says after a layer was unfrozen, and the sum of its weights a step later."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    model[0].requires_grad_(False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = torch.ones(2, 4) * (accelerator.process_index + 1)
    model(batch)  # frozen still
    copied, sent = copy.deepcopy(model), pickle.dumps(model)
    accelerator.unwrap_model(model)[0].requires_grad_(True)
    with torch.no_grad():
        model(batch)
    with accelerator.no_sync(model):
        model(batch)
        with pytest.raises(RuntimeError, match="frozen"), accelerator.trigger_sync_in_backward(model):
            raise AssertionError("gradients are not averaged")
    with pytest.raises(RuntimeError) as refused:
        model(batch)
    for other in (copied, pickle.loads(sent)):
        other(batch)
        other.module[0].requires_grad_(True)
        with pytest.raises(RuntimeError, match="frozen"):
            other(batch)
    model = accelerator.prepare(accelerator.unwrap_model(model))
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    return str(refused.value), accelerator.unwrap_model(model)[0].weight.sum().item()


def test_weights_that_are_unfrozen_later_are_not_left_out_in_silence() -> None:
    (text, first), (_, second) = run_ranks(unfreeze_layer)
    assert "(2, the first is '0.weight')" in text and "accelerator.prepare(accelerator.unwrap_model" in text
    assert first == second
