"""Inference with a pipeline: two processes give what the plain model gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from notebook_accel import inference
from notebook_accel.accelerator import Accelerator
from notebook_accel.inference import prepare_pippy
from tests.unit.multiprocess import run_ranks


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.second(torch.relu(self.first(x)))
        return y


class Net(nn.Module):
    """Layers in a list, a keyword input, and a nested output."""

    def __init__(self, depth: int = 4, width: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor, shift: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        if shift is not None:
            x = x + shift
        return {"logits": self.head(x), "hidden": x}


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum().item() > 0:
            x = self.first(x)
        y: torch.Tensor = self.second(x)
        return y


def make(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().eval()


def ranks_outputs() -> dict[str, Any]:
    model = make()
    plain = make()
    x, shift = torch.randn(11, 6), torch.randn(11, 6)
    accelerator = Accelerator()
    rank = accelerator.process_index
    pipe = prepare_pippy(model, no_split_module_classes=["Block"], example_args=(torch.ones(2, 6),))
    seen: dict[str, Any] = {"points": pipe.hf_split_points, "same": pipe is model}
    seen["clean"] = not any("forward" in vars(part) for part in list(model.modules())[1:])
    for count in (1, 4, 11):  # less than a round, a whole one, several
        out = pipe(x[:count]) if rank == 0 else pipe()
        want = plain(x[:count])
        if out is not None:
            assert not out["logits"].requires_grad
            assert out.keys() == want.keys()
            seen[count] = all(torch.allclose(out[key], want[key], atol=1e-6) for key in want)
        else:
            seen[count] = None
    everywhere = prepare_pippy(
        make(),
        split_points=["blocks.1"],
        example_args=(torch.ones(3, 6),),
        example_kwargs={"shift": torch.ones(3, 6)},
        num_chunks=4,
        gather_output=True,
    )
    out = everywhere(x, shift=shift)
    want = plain(x, shift=shift)
    seen["gathered"] = all(torch.allclose(out[key], want[key], atol=1e-6) for key in want)
    seen["unwrapped"] = torch.equal(
        accelerator.unwrap_model(model, keep_fp32_wrapper=False)(x)["hidden"], plain(x)["hidden"]
    )
    return seen


@pytest.mark.may_leak("shared_memory", reason="torch.fx makes tqdm's lock in the ranks, which end at once")
def test_two_processes_give_what_the_plain_model_gives() -> None:
    first, second = run_ranks(ranks_outputs)
    assert (first[1], first[4], first[11]) == (None, None, None)
    assert (second[1], second[4], second[11]) == (True, True, True)
    for seen in (first, second):
        assert seen["points"] == ["blocks.2"] and seen["same"] and seen["clean"]
        assert seen["gathered"] and seen["unwrapped"]


def ranks_errors() -> list[str]:
    accelerator = Accelerator()
    example = (torch.ones(2, 6),)
    messages = []
    calls: list[tuple[Any, dict[str, Any]]] = [
        (ValueError, {"num_chunks": 0}),
        (ValueError, {"num_chunks": 1.5}),
        (ValueError, {"split_points": ["blocks.9"]}),
        (ValueError, {"split_points": ["blocks.1", "blocks.2"]}),
        (ValueError, {"split_points": "even"}),
        (ValueError, {"split_points": ["blocks"]}),
        (ValueError, {"example_args": ()}),
    ]
    for kind, change in calls:
        with pytest.raises(kind) as caught:
            prepare_pippy(make(), **{"example_args": example, **change})
        messages.append(str(caught.value))
    with pytest.raises(RuntimeError) as untraceable:
        prepare_pippy(Untraceable(), example_args=(torch.ones(2, 2),))
    messages.append(str(untraceable.value))
    pipe = prepare_pippy(make(), example_args=(*example, *example))
    with pytest.raises(ValueError) as other:
        pipe(torch.ones(4, 6))
    messages.append(str(other.value).partition(":")[0])
    with pytest.raises(ValueError) as empty:
        pipe(torch.ones(3, 6), torch.ones(2, 6)) if accelerator.is_main_process else pipe()
    messages.append(str(empty.value))
    return messages


def test_wrong_arguments_are_explained() -> None:
    first, second = run_ranks(ranks_errors)
    assert first == second
    wanted = [
        "num_chunks is an int of at least 1, not 0",
        "not 1.5",
        "['blocks.9'] are no modules of Net",
        "has 2 names, and 2 processes need 1 different ones",
        "'auto' or a list of module names, not 'even'",
        "give 1 stages for 2 processes",
        "they have no tensors",
        "Untraceable cannot be traced by torch.export",
        "must be called like the example",
        "rank 0 got tensors of shapes [3, 6], [2, 6]",
    ]
    for message, part in zip(first, wanted, strict=True):
        assert part in message


def test_one_process_is_refused(clean_runtime: None) -> None:
    Accelerator(cpu=True)
    model = make()
    with pytest.raises(ValueError, match="at least 2 processes, and this run has 1"):
        prepare_pippy(model, example_args=(torch.ones(2, 6),))
    assert "forward" not in vars(model)


def test_stages_are_balanced() -> None:
    layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(8)])
    assert inference._balance_points(layers, 4, ()) == ["2", "4", "6"]
    uneven = nn.Sequential(nn.Linear(40, 40), nn.Linear(2, 2), nn.Linear(2, 2))
    assert inference._balance_points(uneven, 3, ()) == ["1", "2"]
    with pytest.raises(ValueError, match="has 3 parts to split between, too few for 4"):
        inference._balance_points(uneven, 4, ())
    assert inference._balance_points(Net(), 2, [Block]) == ["blocks.2"]
    assert inference._balance_points(Net(), 2, ["Block"]) == ["blocks.2"]
