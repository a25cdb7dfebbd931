"""Tests for the state of optimizers in a checkpoint: one of another kind is refused, whole and in shards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from notebook_accel import Accelerator, CheckpointError
from notebook_accel.checkpointing import optimizers, sharded
from notebook_accel.checkpointing.manifest import Manifest
from notebook_accel.checkpointing.read import Parts

Make = Callable[[Any], torch.optim.Optimizer]
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "Adam": [{"amsgrad": True}, {"foreach": True}, {"fused": True}],
    "AdamW": [{"amsgrad": True}],
    "RMSprop": [{"momentum": 0.9, "centered": True}],
    "SGD": [{"momentum": 0.9, "nesterov": True}, {"momentum": 0.0, "fused": True}],
}


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(2, 3))


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    (trained,) = optimizer.param_groups[0]["params"]
    trained.grad = torch.ones_like(trained)
    if type(optimizer) is torch.optim.SparseAdam:
        trained.grad = trained.grad.to_sparse()
    optimizer.step(lambda: 1.0)  # type: ignore[call-overload]
    return optimizer


def states(optimizer: torch.optim.Optimizer) -> list[tuple[object, set[str]]]:
    return [(number, set(state)) for number, state in enumerate(optimizer.state.values())]


KINDS = [
    pytest.param(
        kind,
        marks=pytest.mark.skipif(
            not hasattr(torch.optim, kind), reason=f"torch {torch.__version__} has no {kind}"
        ),
    )
    for kind in sorted(optimizers._NEEDS)
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_fits_its_own_kind(kind: str) -> None:
    make: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, kind)
    for options in [{}, *OPTIONS.get(kind, [])]:
        before = make([parameter()], lr=0.1, **options)
        after = stepped(make([parameter()], lr=0.1, **options))
        for groups in (after.param_groups, [{**after.param_groups[0], "initial_lr": 1, "newer": None}]):
            optimizers.check_kind("it", before, groups, states(after))
        optimizers.check_kind("it", after, before.param_groups, [])
        (known,) = [optimizers._NEEDS[kind] | optimizers._KNOWS.get(kind, frozenset())]
        tensors = {key for state in after.state.values() for key in state}
        assert kind == "LBFGS" or tensors - {"step"} <= known, "the table is torch's"
        assert kind == "LBFGS" or not after.state or optimizers._NEEDS[kind] <= tensors


@pytest.mark.parametrize(
    ("saved", "loaded", "texts"),
    [
        (
            "SGD",
            "AdamW",
            ["group 0 has no 'betas', 'eps'", "no key 'exp_avg', 'exp_avg_sq'", "'momentum_buffer'"],
        ),
        (
            "AdamW",
            "SGD",
            ["group 0 has no 'dampening', 'momentum'", "has 'exp_avg', 'exp_avg_sq', of another"],
        ),
        ("NAdam", "Adam", ["the state of parameter 0 has 'mu_product', of another optimizer"]),
        ("Adam", "Adamax", ["the state of parameter 0 has no key 'exp_inf'"]),
    ],
)
@pytest.mark.parametrize("trained", [False, True])
def test_another_kind_changes_nothing(
    clean_runtime: None, tmp_path: Path, saved: str, loaded: str, texts: list[str], trained: bool
) -> None:
    options = {"lr": 0.1, "momentum": 0.9} if "SGD" in saved else {"lr": 0.1}
    accelerator = Accelerator(cpu=True)
    model = nn.Module()
    model.weight = parameter()
    first = stepped(getattr(torch.optim, saved)(model.parameters(), **options))
    accelerator.prepare(model, first)
    where = accelerator.save_state(tmp_path / "kept")
    accelerator.free_memory()
    other = getattr(torch.optim, loaded)(model.parameters(), lr=0.2)
    if trained:
        stepped(other)
    accelerator.prepare(model, other)
    before = str(other.state_dict())
    with pytest.raises(CheckpointError) as raised:
        accelerator.load_state(where)
    assert "optimizer.bin" in str(raised.value)
    assert all(text in str(raised.value) for text in texts), raised.value
    assert str(other.state_dict()) == before


class Layered(torch.optim.Optimizer):
    """One that nobody knows, with state and options that are nested."""

    def __init__(self, params: Any, factors: dict[str, float]) -> None:
        super().__init__(params, {"factors": factors})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for item in group["params"]:
                self.state[item] = {
                    "pairs": [torch.ones(2), torch.zeros(3)],
                    "deep": {"a": 1, "b": torch.ones(1)},
                }


class Counting(nn.Linear):
    """A layer with state of its own."""

    def __init__(self, seen: dict[str, Any]) -> None:
        super().__init__(2, 2)
        self.seen = seen

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> Parts:
    return Parts(
        models=[model],
        owners=[model],
        optimizers=[optimizer],
        schedulers=[],
        loaders=[],
        scaler=None,
        custom=[],
    )


def write(where: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    folders = [
        *sharded.model_folders([model.state_dict()], lambda: None),
        *sharded.optimizer_folders([model], [optimizer], lambda: None),
    ]
    for folder in folders:
        folder.write(where)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_shards_of_any_state(tmp_path: Path) -> None:
    model = nn.Sequential(Counting({"batches": 3, "by": {"kind": [1, 2]}}), Counting({}))
    optimizer = Layered(model.parameters(), {"up": 2.0, "down": 0.5})
    optimizer.step()
    write(tmp_path, model, optimizer)
    again = nn.Sequential(Counting({"batches": 0}), Counting({}))
    other = Layered(again.parameters(), {"up": 1.0})
    steps = sharded.plan(Manifest(folder=tmp_path), parts(again, other))
    for apply in steps or ():
        apply()
    assert again[0].seen == {"batches": 3, "by": {"kind": [1, 2]}} and again[1].seen == {}
    assert torch.equal(again[0].weight, model[0].weight)
    assert other.param_groups[0]["factors"] == {"up": 2.0, "down": 0.5}
    assert str(other.state_dict()) == str(optimizer.state_dict())
    both = [
        {"params": [layer.weight for layer in again], "lr": 0.1},
        {"params": [layer.bias for layer in again]},
    ]
    write(tmp_path / "groups", again, torch.optim.SGD(both, lr=0.2))
    sharded.plan(Manifest(folder=tmp_path / "groups"), parts(again, torch.optim.SGD(both)))
    both[0]["params"], both[1]["params"] = both[1]["params"], both[0]["params"]
    with pytest.raises(
        CheckpointError, match=r"has '0.weight', '1.weight' in group 0, the optimizer in another"
    ):
        sharded.plan(Manifest(folder=tmp_path / "groups"), parts(again, torch.optim.SGD(both)))
    wrong = torch.optim.SGD(again.parameters(), lr=0.1)
    write(tmp_path / "sgd", again, wrong)
    adam = torch.optim.AdamW(again.parameters(), lr=0.1)
    with pytest.raises(
        CheckpointError, match=r"optimizer_0 does not fit AdamW: group 0 has no 'betas', 'eps'$"
    ):
        sharded.plan(Manifest(folder=tmp_path / "sgd"), parts(again, adam))
