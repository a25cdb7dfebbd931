"""GradientState, and the choices of gradient accumulation as a dict that can be changed."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from notebook_accel import Accelerator, runtime
from notebook_accel.handlers import GradientAccumulationPlugin
from notebook_accel.state import GradientState, PartialState

pytestmark = pytest.mark.usefixtures("clean_runtime")


def test_the_users_choices_are_read_and_set_in_a_dict() -> None:
    state = Accelerator(
        cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=4, sync_each_batch=True)
    ).gradient_state
    assert dict(state.plugin_kwargs) == {"num_steps": 4, "sync_each_batch": True}
    assert state.plugin_kwargs.get("sync_with_dataloader", True) and len(state.plugin_kwargs) == 2
    state.plugin_kwargs.update({"num_steps": 2})
    assert state.num_steps == 2 and GradientState().num_steps == 2
    del state.plugin_kwargs["sync_each_batch"]
    assert repr(state.plugin_kwargs) == "{'num_steps': 2}"
    assert repr(state).endswith("\nGradient accumulation plugin: {'num_steps': 2}\n")
    with pytest.raises(KeyError, match="no choice of gradient accumulation, choose among num_steps"):
        state.plugin_kwargs["steps"] = 3


def test_all_choices_are_set_at_once() -> None:
    state = Accelerator(cpu=True).gradient_state
    assert state.plugin_kwargs == {"num_steps": 1}
    state.plugin_kwargs = {"num_steps": 2, "sync_each_batch": True}
    assert state.plugin_kwargs == {"num_steps": 2, "sync_each_batch": True}
    state.plugin_kwargs.clear()
    assert state.plugin_kwargs == {"num_steps": 1}
    assert state.plugin_kwargs.pop("num_steps") == 1 and state.plugin_kwargs.popitem() == ("num_steps", 1)
    state.plugin_kwargs = {}
    assert state.plugin_kwargs == {"num_steps": 1}
    with pytest.raises(KeyError, match="no choice of gradient accumulation"):
        state.plugin_kwargs = {"steps": 2}


def test_the_shared_state_of_accumulation() -> None:
    assert GradientState._shared_state == {}
    state = Accelerator(cpu=True, gradient_accumulation_steps=3).gradient_state
    assert GradientState._shared_state["plugin_kwargs"] == {"num_steps": 3}
    GradientState._shared_state.clear()
    assert state.num_steps == 1


class Loader:
    iteration = 1
    batches_seen = 2
    length = 3


def test_gradient_state_is_a_view() -> None:
    before = GradientState()
    assert before.sync_gradients and before.num_steps == 1 and not before.in_dataloader
    PartialState(cpu=True)
    loader = Loader()
    installed = runtime.current()
    assert installed is not None
    installed.gradient.begin(loader)
    assert before.active_dataloader is loader and before.dataloader_references == [None, loader]
    before.sync_gradients = False
    assert not installed.gradient.sync_gradients


def test_what_was_chosen_before_there_is_a_runtime_stays() -> None:
    first = GradientState(GradientAccumulationPlugin(num_steps=4))
    assert GradientState().num_steps == 4 and GradientState._shared_state["plugin_kwargs"] == {"num_steps": 4}
    first.sync_gradients = False
    PartialState(cpu=True)
    assert first.num_steps == GradientState().num_steps == 4 and not GradientState().sync_gradients
    PartialState._reset_state()
    assert GradientState._shared_state == {}
    GradientState(GradientAccumulationPlugin(num_steps=4))
    GradientState._reset_state()
    assert GradientState._shared_state == {} and GradientState().num_steps == 1


def replace_choices(library: Any, plugins: list[dict[str, Any]]) -> list[Any]:
    seen = []  # ours shows a number of steps that is the default too
    for given in plugins:
        plugin = library.utils.GradientAccumulationPlugin(**given)
        library.Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
        state = library.state.GradientState()
        seen.append(({"num_steps": 1} | dict(state.plugin_kwargs), state.num_steps))
    for given in plugins:
        state = library.state.GradientState(library.utils.GradientAccumulationPlugin(**given))
        seen.append(({"num_steps": 1} | dict(state.plugin_kwargs), state.num_steps))
    return seen


def test_a_later_plugin_replaces_all_choices_as_in_accelerate() -> None:
    plugins = [{"num_steps": 2, "sync_each_batch": True}, {"num_steps": 3}, {"adjust_scheduler": False}]
    own, reference = (importlib.import_module(name) for name in ("notebook_accel", "accelerate"))
    try:
        assert replace_choices(own, plugins) == replace_choices(reference, plugins)
    finally:
        for kind in (
            reference.state.AcceleratorState,
            reference.state.PartialState,
            reference.state.GradientState,
        ):
            kind._reset_state()
