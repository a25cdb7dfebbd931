"""`_shared_state`: libraries look whether it is empty, and clear it."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch

from notebook_accel import Accelerator, FullyShardedDataParallelPlugin, PartialState
from notebook_accel.state import AcceleratorState, DistributedType, GradientState
from notebook_accel.utils.registry import is_initialized

pytestmark = pytest.mark.usefixtures("clean_runtime")


def test_it_is_empty_before_use_and_filled_after() -> None:
    assert PartialState._shared_state == {} and AcceleratorState._shared_state == {}
    state = PartialState(cpu=True)
    assert (
        PartialState._shared_state["device"] == torch.device("cpu") and AcceleratorState._shared_state == {}
    )
    assert {"_cpu", "backend", "debug", "distributed_type", "num_processes"} <= state._shared_state.keys()
    Accelerator(cpu=True)
    assert AcceleratorState._shared_state["mixed_precision"] == "no"


def test_clearing_it_resets_the_state() -> None:
    Accelerator(cpu=True)
    AcceleratorState._shared_state.clear()
    assert AcceleratorState._shared_state == {} and PartialState._shared_state != {}
    Accelerator(cpu=True, mixed_precision="bf16")
    PartialState._shared_state.clear()
    assert PartialState._shared_state == {}


def test_setting_it_to_an_empty_dict_resets_the_state() -> None:
    Accelerator(cpu=True, mixed_precision="bf16")
    AcceleratorState._shared_state = {}
    assert AcceleratorState._shared_state == {} and PartialState._shared_state != {}
    with pytest.raises(ValueError, match="make an Accelerator"):
        AcceleratorState()
    PartialState._shared_state = {}
    assert PartialState._shared_state == {} and not is_initialized()
    assert Accelerator(cpu=True).mixed_precision == "no", "what was set is no value that stays"


def test_a_value_that_it_had_brings_that_state_back() -> None:
    own = Accelerator(cpu=True, gradient_accumulation_steps=3)
    kept = [kind._shared_state for kind in (PartialState, AcceleratorState)]
    PartialState._shared_state = {}
    assert Accelerator(cpu=True, mixed_precision="bf16").gradient_accumulation_steps == 1
    PartialState._shared_state, AcceleratorState._shared_state = kept
    assert AcceleratorState._shared_state == kept[1] and AcceleratorState().mixed_precision == "no"
    assert own.gradient_accumulation_steps == 3 and GradientState().num_steps == 3
    with mock.patch.object(GradientState, "_shared_state", {}):
        assert GradientState().num_steps == 1
    assert GradientState().num_steps == 3
    with mock.patch.object(AcceleratorState, "_shared_state", {}):
        assert not is_initialized()
    assert AcceleratorState().mixed_precision == "no" and is_initialized()
    for kind in (PartialState, AcceleratorState):
        saved = dict(kind._shared_state)
        kind._shared_state = {}
        kind._shared_state = saved
        assert kind._shared_state == saved and is_initialized()


def test_a_wrong_value_leaves_the_state_as_it_is() -> None:
    Accelerator(cpu=True, mixed_precision="bf16")
    for wrong in (None, {"misspelt": 1}, 5):
        with pytest.raises((TypeError, AttributeError)):
            AcceleratorState._shared_state = wrong  # type: ignore[assignment]
        assert AcceleratorState().mixed_precision == "bf16"
    assert copy.deepcopy(AcceleratorState._shared_state) == copy.copy(AcceleratorState._shared_state)


def test_a_state_that_was_saved_is_put_back() -> None:
    """As tests do that need a state of their own."""
    Accelerator(cpu=True, mixed_precision="bf16")
    saved = AcceleratorState._shared_state.copy()
    AcceleratorState._shared_state.clear()
    Accelerator(cpu=True)
    AcceleratorState._shared_state.clear()
    AcceleratorState._shared_state.update(saved)
    assert AcceleratorState().mixed_precision == "bf16"


def test_what_does_not_count_is_refused() -> None:
    Accelerator(cpu=True)
    shared = AcceleratorState._shared_state
    for remove in (
        lambda: shared.pop("debug"),
        lambda: shared.popitem(),
        lambda: shared.__delitem__("debug"),
    ):
        with pytest.raises(TypeError, match=r"can.* be removed from a state: clear"):
            remove()
    with pytest.raises(KeyError):
        shared.pop("nothing")
    assert shared.pop("nothing", 5) == 5 and shared.setdefault("debug", True) is False
    with pytest.raises(AttributeError, match="'misspelt' is no part of AcceleratorState"):
        shared["misspelt"] = 1
    shared |= {"debug": True}
    assert AcceleratorState().debug


def test_values_that_it_is_set_to_count() -> None:
    PartialState(cpu=True)
    PartialState._shared_state = {"debug": True}
    assert PartialState().debug


def test_what_is_set_in_it_counts() -> None:
    Accelerator(cpu=True)
    AcceleratorState._shared_state["distributed_type"] = "FSDP"
    assert AcceleratorState().distributed_type is DistributedType.FSDP


def test_fields_of_the_state_can_be_set() -> None:
    state = Accelerator(cpu=True).state
    plugin = FullyShardedDataParallelPlugin()
    state.debug, state.fsdp_plugin, state.distributed_type = True, plugin, DistributedType.FSDP
    other = AcceleratorState()
    assert (other.debug, other.fsdp_plugin, other.distributed_type) == (True, plugin, DistributedType.FSDP)
    with pytest.raises(ValueError, match="MULTI"):
        state.distributed_type = "MULTI"


def test_a_type_is_told_by_its_name_and_class() -> None:
    assert str(DistributedType.NO) == "DistributedType.NO" and DistributedType.NO == "NO"
    assert f"{DistributedType.MULTI_CPU}" == "DistributedType.MULTI_CPU"
