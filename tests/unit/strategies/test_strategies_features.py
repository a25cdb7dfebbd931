"""Features of training with each way to spread a model, on four processes: each trains and resumes as on one.

A cell is a feature and a spread. It trains on one process and on four, both save before the last step, and each loads
the other's checkpoint. The suite tries some features with one spread each, and MATRIX=all each with every one.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from notebook_accel import Accelerator, ParallelismConfig
from notebook_accel.compilation import TorchDynamoPlugin
from notebook_accel.fsdp import FullyShardedDataParallelPlugin
from notebook_accel.handlers import DistributedDataParallelKwargs
from notebook_accel.local_sgd import LocalSGD
from notebook_accel.state import AcceleratorState
from tests.unit import gpt, matrix
from tests.unit.multiprocess import run_ranks

BATCH = 8
STEPS = 3
SPREADS: dict[str, dict[str, int]] = {
    "ddp": {},
    "fsdp": {},
    "tp": {"tp_size": 4},
    "fsdp x tp": {"dp_shard_size": 2, "tp_size": 2},
    "hsdp": {"dp_replicate_size": 2, "dp_shard_size": 2},
}


class Counting(torch.optim.Optimizer):
    """Plain descent with state that is no tensor: numbers, texts, None, lists and dicts."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "names": ["a", "b"], "nothing": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state |= {"word": "x", "none": None, "rates": [0.5, {"inner": state["count"]}]}
                state["steps"] = torch.tensor(float(state["count"]))
                rate = group["lr"] / state["rates"][1]["inner"] / float(state["steps"])
                parameter.sub_(parameter.grad, alpha=rate)


class Normed(gpt.GPT):
    """Normalizes its logits by statistics of the batches, which are buffers."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.statistics = nn.BatchNorm1d(gpt.VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.statistics(super().forward(tokens).flatten(0, 1)).unflatten(0, tokens.shape)


class Partial(gpt.GPT):
    """Does not use all of its weights."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.spare = nn.Linear(8, 8)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _in_groups(model: nn.Module) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    norms = [value for name, value in named.items() if "norm" in name]
    rest = [value for name, value in named.items() if "norm" not in name]
    groups = [{"params": rest, "lr": 3e-3}, {"params": norms, "lr": 1e-4, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3)


def _muon(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [value for value in model.parameters() if value.dim() == 2]
    return torch.optim.Muon(matrices, lr=1e-2)


def _frozen() -> nn.Module:
    model = gpt.GPT(layers=1)
    for parameter in (*model.blocks[0].up.parameters(), model.places.weight):
        parameter.requires_grad_(False)
    return model


def _kind(name: str, **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: getattr(torch.optim, name)(model.parameters(), **options)


@dataclass(frozen=True, kw_only=True)
class Feature:
    """What a cell tries.

    Attributes:
        model: builds the model.
        optimizer: builds its optimizer.
        models: how many are trained side by side.
        options: more arguments of Accelerator.
        fsdp: more options of FSDP.
        schedules: the learning rate changes in every step.
        saves: arguments of `save_state`.
        step: how gradients become a step: see `take_step`.
        alike: all processes see the same batches.
        spreads: those that have the feature.
        tolerance: of losses, relative.
    """

    model: Callable[[], nn.Module] = lambda: gpt.GPT(layers=1)
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = _adamw
    models: int = 1
    options: Callable[[], dict[str, Any]] = dict
    fsdp: dict[str, Any] = field(default_factory=dict)
    schedules: bool = False
    saves: dict[str, Any] = field(default_factory=dict)
    step: str = ""
    alike: bool = False
    spreads: tuple[str, ...] = tuple(SPREADS)
    tolerance: float = 1e-5


def _ddp(**options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"kwargs_handlers": [DistributedDataParallelKwargs(**options)]}


def _compiled(**options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"dynamo_plugin": TorchDynamoPlugin(backend="eager", **options)}


FEATURES: dict[str, Feature] = {
    "full checkpoint": Feature(fsdp={"state_dict_type": "FULL_STATE_DICT"}),
    "sharded checkpoint": Feature(fsdp={"state_dict_type": "SHARDED_STATE_DICT"}),
    "saved in the background": Feature(
        fsdp={"state_dict_type": "SHARDED_STATE_DICT"}, saves={"async_save": True}
    ),
    "saved in the background, full": Feature(
        fsdp={"state_dict_type": "FULL_STATE_DICT"}, saves={"async_save": True}
    ),
    "recomputed": Feature(fsdp={"activation_checkpointing": True}),
    "compiled": Feature(options=_compiled()),
    "compiled by regions": Feature(options=_compiled(use_regional_compilation=True)),
    "compiled, recomputed": Feature(options=_compiled(), fsdp={"activation_checkpointing": True}),
    "two models": Feature(models=2),
    "two models, sharded checkpoint": Feature(models=2, fsdp={"state_dict_type": "SHARDED_STATE_DICT"}),
    "scheduled": Feature(schedules=True),
    "clipped by value": Feature(step="clip value"),
    "clipped by largest": Feature(step="clip inf"),
    "no_sync": Feature(step="no_sync"),
    "no_sync, synced in backward": Feature(step="trigger"),
    "not tied": Feature(model=lambda: gpt.GPT(layers=1, tied=False)),
    "frozen": Feature(model=_frozen),
    "frozen, sharded checkpoint": Feature(model=_frozen, fsdp={"state_dict_type": "SHARDED_STATE_DICT"}),
    "batch norm": Feature(model=Normed, alike=True),
    "batch norm, sharded checkpoint": Feature(
        model=Normed, alike=True, fsdp={"state_dict_type": "SHARDED_STATE_DICT"}
    ),
    "groups": Feature(optimizer=_in_groups),
    "groups, sharded checkpoint": Feature(
        optimizer=_in_groups, schedules=True, fsdp={"state_dict_type": "SHARDED_STATE_DICT"}
    ),
    "unused": Feature(model=Partial, options=_ddp(find_unused_parameters=True)),
    "unused, sharded checkpoint": Feature(
        model=Partial,
        options=_ddp(find_unused_parameters=True),
        fsdp={"state_dict_type": "SHARDED_STATE_DICT"},
    ),
    "SGD with momentum": Feature(optimizer=_kind("SGD", lr=1e-2, momentum=0.9, nesterov=True)),
    "Adafactor": Feature(optimizer=_kind("Adafactor", lr=1e-2), spreads=("ddp",)),
    "Adagrad": Feature(optimizer=_kind("Adagrad", lr=1e-2)),
    "Adadelta": Feature(optimizer=_kind("Adadelta", lr=0.1)),
    "Adamax": Feature(optimizer=_kind("Adamax", lr=1e-3)),
    "Muon": Feature(optimizer=_muon, tolerance=1e-4),  # its products are of bfloat16
    "RMSprop": Feature(optimizer=_kind("RMSprop", lr=1e-3, momentum=0.5, centered=True)),
    "amsgrad": Feature(optimizer=_kind("Adam", lr=1e-3, amsgrad=True)),
    "NAdam": Feature(optimizer=_kind("NAdam", lr=1e-3)),
    "RAdam": Feature(optimizer=_kind("RAdam", lr=1e-3)),
    "Rprop": Feature(optimizer=_kind("Rprop", lr=1e-3), spreads=("ddp",)),
    "ASGD": Feature(optimizer=_kind("ASGD", lr=1e-2)),
    "state of no tensors": Feature(optimizer=lambda model: Counting(model.parameters(), lr=1e-2)),
    "state of no tensors, sharded checkpoint": Feature(
        optimizer=lambda model: Counting(model.parameters(), lr=1e-2),
        fsdp={"state_dict_type": "SHARDED_STATE_DICT"},
    ),
    "LBFGS": Feature(
        optimizer=_kind("LBFGS", lr=0.1, max_iter=3), step="closure", tolerance=1e-4, spreads=("ddp",)
    ),
    "closure": Feature(step="closure"),
    "bf16 hook": Feature(options=_ddp(comm_hook="fp16"), spreads=("ddp",), tolerance=1e-3),
    "PowerSGD": Feature(
        options=_ddp(comm_hook="power_sgd", comm_state_option={"start_powerSGD_iter": 100}), spreads=("ddp",)
    ),
    "static graph": Feature(options=_ddp(static_graph=True), spreads=("ddp",)),
    "gradients as views": Feature(options=_ddp(gradient_as_bucket_view=True), spreads=("ddp",)),
    "LocalSGD": Feature(optimizer=_kind("SGD", lr=1e-2), step="local", spreads=("ddp",)),
}


IN_THE_SUITE = (
    "sharded checkpoint",
    "two models, sharded checkpoint",
    "recomputed",
    "scheduled",
    "clipped by value",
    "clipped by largest",
    "no_sync, synced in backward",
    "frozen, sharded checkpoint",
    "batch norm, sharded checkpoint",
    "groups, sharded checkpoint",
    "unused, sharded checkpoint",
    "Adagrad",
    "state of no tensors, sharded checkpoint",
    "LBFGS",
    "LocalSGD",
)
"""Those that no other test trains on several processes."""


def arguments_of(spread: str, feature: Feature) -> dict[str, Any]:
    """Return arguments of Accelerator."""
    found = dict(feature.options())
    if SPREADS[spread]:
        found["parallelism_config"] = ParallelismConfig(**SPREADS[spread])  # type: ignore[arg-type]
    if spread != "ddp":
        found["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP", **feature.fsdp
        )
    return found


class Training:
    """Models of a cell, prepared."""

    def __init__(self, feature: Feature, **arguments: Any) -> None:
        AcceleratorState._reset_state()
        self.feature = feature
        # batches are of the run: the loop takes its part of each by itself, and schedules step once
        self.accelerator = Accelerator(cpu=True, split_batches=True, **arguments)
        torch.manual_seed(0)
        raw = [feature.model() for _ in range(feature.models)]
        optimizers = [feature.optimizer(model) for model in raw]
        schedulers = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            for optimizer in optimizers
            if feature.schedules
        ]
        made = self.accelerator.prepare(*raw, *optimizers, *schedulers)
        count = feature.models
        self.models, self.optimizers = made[:count], made[count : 2 * count]
        self.schedulers = made[2 * count :]

    def take_step(self, number: int) -> list[float]:
        """Take one step of every optimizer, and return the means of the losses over all processes."""
        accelerator, feature = self.accelerator, self.feature
        config = accelerator.parallelism_config
        shares = accelerator.num_processes if config is None else config.data_parallel_size
        shares = 1 if feature.alike else shares
        share = accelerator.process_index * shares // accelerator.num_processes
        batch = list(gpt.loader(BATCH, STEPS))[number]
        part = [tensor.chunk(shares)[share] for tensor in batch]
        losses = []
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            losses.append(self._train(model, optimizer, part))
            for scheduler in self.schedulers:
                scheduler.step()
        return [float(accelerator.reduce(loss.detach(), "mean")) for loss in losses]

    def _train(self, model: Any, optimizer: Any, part: list[torch.Tensor]) -> torch.Tensor:
        accelerator, how = self.accelerator, self.feature.step
        if how == "closure":
            return self._close(model, optimizer, part)
        if how in ("no_sync", "trigger"):
            with accelerator.no_sync(model):
                first = gpt.loss_of(model, [tensor[::2] for tensor in part]) / 2
                accelerator.backward(first)
            if how == "trigger":
                with accelerator.no_sync(model):
                    second = gpt.loss_of(model, [tensor[1::2] for tensor in part]) / 2
                with accelerator.trigger_sync_in_backward(model):
                    accelerator.backward(second)
            else:
                second = gpt.loss_of(model, [tensor[1::2] for tensor in part]) / 2
                accelerator.backward(second)
            loss = first.detach() + second.detach()
        elif how == "local":
            with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=1) as local:
                loss = gpt.loss_of(model, part)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                local.step()
            return loss
        else:
            loss = gpt.loss_of(model, part)
            accelerator.backward(loss)
        if how == "clip value":
            accelerator.clip_grad_value_(model.parameters(), 1e-3)
        if how == "clip inf":
            assert accelerator.clip_grad_norm_(model.parameters(), 1e-2, norm_type=float("inf")) > 1e-2
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def _close(self, model: Any, optimizer: Any, part: list[torch.Tensor]) -> torch.Tensor:
        losses = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = gpt.loss_of(model, part)
            self.accelerator.backward(loss)
            # all processes have to see the same number, since the line search depends on it
            losses.append(loss)
            return self.accelerator.reduce(loss.detach(), "mean")

        optimizer.step(closure)
        return losses[0]

    def run(self, folder: str, other: str | None = None) -> list[list[float]]:
        """Return the losses of all steps, and that of the last one after another run's checkpoint."""
        losses = [self.take_step(number) for number in range(STEPS - 1)]
        self.accelerator.save_state(folder, **self.feature.saves)
        losses.append(self.take_step(STEPS - 1))
        self.accelerator.load_state(other or folder)
        losses.append(self.take_step(STEPS - 1))
        self.accelerator.free_memory()
        return losses


def choose_cells() -> list[tuple[str, str]]:
    """Return features with spreads: all where MATRIX=all, else those of the suite, each with one spread in turn."""
    if matrix.TRIES_ALL:
        return [(name, spread) for name, feature in FEATURES.items() for spread in feature.spreads]
    spreads = itertools.cycle(("fsdp", "fsdp x tp", "hsdp", "tp"))
    return [(name, "ddp" if FEATURES[name].spreads == ("ddp",) else next(spreads)) for name in IN_THE_SUITE]


def run_cell(cell: tuple[str, str], folder: str) -> list[list[float]]:
    name, spread = cell
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = Training(FEATURES[name], **arguments_of(spread, FEATURES[name]))
        return training.run(f"{folder}/four/{name}/{spread}", f"{folder}/one/{name}")


def on_four(cells: list[tuple[str, str]], folder: str) -> list[Any]:
    return [run_cell(cell, folder) for cell in cells]


def train_alone(name: str) -> Training:
    feature = FEATURES[name]
    options = feature.options()
    return Training(feature, **{key: options[key] for key in ("dynamo_plugin",) if key in options})


def run_alone(name: str, folder: str) -> list[list[float]]:
    return train_alone(name).run(f"{folder}/one/{name}")


def resume_alone(name: str, folder: str) -> list[float]:
    training = train_alone(name)
    training.accelerator.load_state(folder)
    return training.take_step(STEPS - 1)


@pytest.mark.timeout(matrix.SECONDS + 60)
def test_features(clean_runtime: None, tmp_path: Path) -> None:
    cells = choose_cells()
    folder = str(tmp_path)
    expected = {name: run_alone(name, folder) for name in dict.fromkeys(name for name, _ in cells)}
    found = run_ranks(on_four, cells, folder, world_size=4, timeout=matrix.SECONDS)
    for number, (name, spread) in enumerate(cells):
        close = {"rtol": FEATURES[name].tolerance, "atol": 0.0, "msg": f"{name}, {spread}"}
        for rank in found:
            torch.testing.assert_close(rank[number], expected[name], **close)  # type: ignore[arg-type]
        resumed = resume_alone(name, f"{folder}/four/{name}/{spread}")
        torch.testing.assert_close(resumed, expected[name][-1], **close)  # type: ignore[arg-type]
