"""`_shared_state`: libraries look whether it is empty, and clear it."""

from __future__ import annotations

import pytest
import torch

from notebook_accel import Accelerator, FullyShardedDataParallelPlugin, PartialState
from notebook_accel.state import AcceleratorState, DistributedType

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
