"""Public attributes of states, accelerators and what they prepare: all that Accelerate's have."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import notebook_accel
from tests.guards import ProcessGroup

accelerate = pytest.importorskip("accelerate")
HANDLERS = ("AutocastKwargs", "DistributedDataParallelKwargs", "GradScalerKwargs", "ProfileKwargs")
KINDS = (
    *("PartialState", "AcceleratorState", "GradientState"),
    *("Accelerator", "AcceleratedOptimizer", "AcceleratedScheduler"),
)


@pytest.fixture
def clean_states(clean_runtime: None) -> Iterator[None]:
    """Take down Accelerate's states too."""
    yield
    state = importlib.import_module("accelerate.state")
    for kind in (state.AcceleratorState, state.PartialState, state.GradientState):
        kind._reset_state()
    ProcessGroup().restore(False)


def make_all(library: Any, **arguments: Any) -> dict[str, Any]:
    """Return an object of each kind by its name."""
    state = importlib.import_module(f"{library.__name__}.state")
    accelerator = library.Accelerator(cpu=True, **arguments)
    model = torch.nn.Linear(2, 2)
    raw = torch.optim.SGD(model.parameters(), 0.1)
    _, optimizer, scheduler = accelerator.prepare(model, raw, torch.optim.lr_scheduler.StepLR(raw, 1))
    found = [
        state.PartialState(),
        state.AcceleratorState(),
        state.GradientState(),
        accelerator,
        optimizer,
        scheduler,
    ]
    return dict(zip(KINDS, found, strict=True))


def public(thing: Any) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


@pytest.mark.usefixtures("clean_states")
def test_no_public_attribute_is_missing() -> None:
    theirs, ours = make_all(accelerate), make_all(notebook_accel)
    missing = {kind: sorted(public(theirs[kind]) - public(ours[kind])) for kind in KINDS}
    assert not any(missing.values()), missing


def read_handlers(library: Any, given: bool) -> dict[str, Any]:
    """Return the attributes that handlers are, as texts or None."""
    classes = importlib.import_module(f"{library.__name__}.utils")
    handlers = [getattr(classes, name)() for name in HANDLERS] if given else None
    accelerator = make_all(library, kwargs_handlers=handlers)["Accelerator"]
    names = [name for name in public(accelerator) if name.endswith("_handler")]
    found = {
        name: value if isinstance(value := getattr(accelerator, name), bool) else type(value).__name__
        for name in names
    }
    flags = ("fp8_enabled", "delayed_fp8_autocast", "has_lomo_optimizer", "flag_tensor")
    return {**found, **{name: getattr(accelerator, name) for name in flags}}


@pytest.mark.usefixtures("clean_states")
@pytest.mark.parametrize("given", [True, False])
def test_handlers_are_where_accelerate_has_them(given: bool) -> None:
    assert read_handlers(notebook_accel, given) == read_handlers(accelerate, given)
