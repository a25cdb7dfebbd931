"""What an Accelerator's methods are given by mistake is named, before anything has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Subset, TensorDataset

from notebook_accel import Accelerator
from notebook_accel.local_sgd import LocalSGD
from notebook_accel.utils import ProjectConfiguration
from tests.unit.multiprocess import run_ranks


class Parts:
    """An accelerator, and what a user gives to the wrong method."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        self.model = torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)


@pytest.fixture
def parts(clean_runtime: None) -> Parts:
    return Parts(Accelerator(cpu=True))


Mistake = tuple[Callable[[Parts], Any], str]
MISTAKES: dict[str, Mistake] = {
    "accumulate": (lambda it: it.accelerator.accumulate("x"), "a model, a torch.nn.Module, not str"),
    "accumulate, nested": (
        lambda it: it.accelerator.accumulate([it.model, it.optimizer]),
        "accumulate takes a model, a torch.nn.Module, not SGD",
    ),
    "no_sync": (
        lambda it: it.accelerator.no_sync(None),
        "no_sync takes a model, a torch.nn.Module, not None",
    ),
    "backward": (lambda it: it.accelerator.backward(0.5), "backward takes a loss, a tensor with one element"),
    "clip": (lambda it: it.accelerator.clip_grad_norm_("x", 1.0), "parameters is a str"),
    "clip a number": (lambda it: it.accelerator.clip_grad_value_(3, 1.0), "parameters is a int"),
    "autocast": (lambda it: it.accelerator.autocast("bf16"), "autocast takes AutocastKwargs, not str"),
    "profile": (
        lambda it: it.accelerator.profile("cpu").__enter__(),
        "profile takes ProfileKwargs, not str",
    ),
    "prepare_model": (
        lambda it: it.accelerator.prepare_model(torch.nn.Linear),
        "prepare_model takes a model, a torch.nn.Module, not the class Linear",
    ),
    "prepare_optimizer": (
        lambda it: it.accelerator.prepare_optimizer(it.model),
        "prepare_optimizer takes an optimizer of torch, not Linear",
    ),
    "prepare_data_loader": (
        lambda it: it.accelerator.prepare_data_loader([1, 2]),
        "prepare_data_loader takes a DataLoader, not [1, 2]",
    ),
    "prepare_scheduler": (
        lambda it: it.accelerator.prepare_scheduler("cosine"),
        "prepare_scheduler takes a scheduler of torch, not str",
    ),
    "places": (
        lambda it: it.accelerator.prepare(it.model, device_placement=True),
        "device_placement=True: a list is needed, with True, False or None for each object",
    ),
    "places by name": (
        lambda it: it.accelerator.prepare(it.model, device_placement=["cpu"]),
        "device_placement=['cpu']: a list is needed",
    ),
    "prepare_scheduler, its optimizer": (
        lambda it: it.accelerator.prepare_scheduler(it.optimizer),
        "prepare_scheduler takes a scheduler of torch, not SGD",
    ),
    "prepare_data_loader, a part of a dataset": (
        lambda it: it.accelerator.prepare_data_loader(Subset(TensorDataset(torch.ones(2)), [0])),
        "prepare_data_loader takes a DataLoader, not <torch.utils.data.dataset.Subset",
    ),
    "accumulate, a class": (
        lambda it: it.accelerator.accumulate(DistributedDataParallel),
        "accumulate takes a model, a torch.nn.Module, not the class DistributedDataParallel",
    ),
    "unwrap_model": (lambda it: it.accelerator.unwrap_model(3), "unwrap_model takes a model"),
    "get_state_dict": (
        lambda it: it.accelerator.get_state_dict(it.optimizer),
        "get_state_dict takes a model, a torch.nn.Module, not SGD",
    ),
    "save_model": (lambda it: it.accelerator.save_model({}, "x"), "save_model takes a model"),
    "pad": (
        lambda it: it.accelerator.pad_across_processes("x"),
        "pad_across_processes takes nested tuples, lists, dicts and dataclasses of tensors, but found str",
    ),
    "a hook": (
        lambda it: it.accelerator.register_save_state_pre_hook(3),
        "a hook has to be a function, not 3",
    ),
    "another hook": (lambda it: it.accelerator.register_load_state_pre_hook("f"), "not 'f'"),
    "a decorator": (lambda it: it.accelerator.on_main_process(3), "a function is needed to decorate, not 3"),
    "LocalSGD": (lambda it: LocalSGD(None, it.model, 2), "LocalSGD takes an Accelerator"),  # type: ignore[arg-type]
    "its model": (lambda it: LocalSGD(it.accelerator, "x", 2), "LocalSGD takes a model"),  # type: ignore[arg-type]
    "its steps": (
        lambda it: LocalSGD(it.accelerator, it.model, "2"),  # type: ignore[arg-type]
        "local_sgd_steps='2': an integer is needed",
    ),
    "total_limit": (
        lambda it: ProjectConfiguration(total_limit="a"),  # type: ignore[arg-type]
        "total_limit='a': an integer is needed",
    ),
    "iteration": (
        lambda it: ProjectConfiguration(iteration=None),  # type: ignore[arg-type]
        "iteration=None: an integer is needed",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named(mistake: Mistake, parts: Parts) -> None:
    act, wanted = mistake
    with pytest.raises(TypeError) as caught:
        act(parts)
    assert wanted in str(caught.value)
    names = ("models", "optimizers", "schedulers", "dataloaders", "save_hooks", "load_hooks")
    assert not any(getattr(parts.accelerator, f"_{name}") for name in names) and parts.accelerator.step == 0


def test_what_counts_as_right(parts: Parts, tmp_path: Path) -> None:
    class Schedule:
        def step(self) -> None: ...

    class Wrapper:
        """Of a model, but no module."""

        def __getattr__(self, name: str) -> Any:
            return getattr(parts.model, name)

    accelerator, model, schedule = parts.accelerator, parts.model, Schedule()
    assert accelerator.prepare_scheduler(schedule).scheduler is schedule
    accelerator.prepare(model, parts.optimizer, device_placement=np.array([True, False]))
    with accelerator.accumulate(Wrapper()), accelerator.no_sync(Wrapper()):
        pass
    assert accelerator.get_state_dict(Wrapper(), unwrap=False).keys() == model.state_dict().keys()
    assert ProjectConfiguration(total_limit=np.int64(2)).total_limit == 2
    assert len(accelerator.pad_across_processes({"a": [torch.ones(2)]})["a"][0]) == 2


def _accumulate_a_list() -> list[bool]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    models: list[Any] = [accelerator.prepare(torch.nn.Linear(1, 1)) for _ in range(3)]
    reduced = []
    for _ in range(2):
        with accelerator.accumulate(models[:2], models[2]):
            for model in models:
                model(torch.ones(1, 1) * (accelerator.process_index + 1)).sum().backward()
                grads = accelerator.gather(model.module.weight.grad).flatten().tolist()
                reduced.append(grads[0] == grads[1])
    return reduced


def test_lists_of_models_accumulate() -> None:
    """As example scripts of diffusers call it: their gradients stay with the process until there is a step."""
    assert run_ranks(_accumulate_a_list) == [[False] * 3 + [True] * 3] * 2
