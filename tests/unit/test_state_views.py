"""`_shared_state`: libraries look whether it is empty, and clear it."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import pickle
import weakref
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from notebook_accel import Accelerator, FullyShardedDataParallelPlugin, PartialState, detect, runtime
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


# --- set, patched and cleared, one in another ---------------------------------------------------------------------

STATES = (PartialState, AcceleratorState, GradientState)


def describe() -> list[dict[str, object]]:
    """Return what the states show, with the runtimes that they are of."""
    return [kind._shared_state.copy() for kind in STATES]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("is_nested", [True, False], ids=["nested", "interleaved"])
@pytest.mark.parametrize("has_state", [True, False], ids=["filled", "empty"])
def test_patches_bring_all_states_back(order: tuple[int, ...], is_nested: bool, has_state: bool) -> None:
    """Each patch starts on what the ones before left, with an accelerator in between; they stop in any order."""
    own = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=3) if has_state else None
    before = describe()
    patches = [mock.patch.object(STATES[number], "_shared_state", {}) for number in order]
    for number, patch in enumerate(patches):
        patch.start()
        has_own_steps = {0, 2} & set(order[: number + 1])  # an accelerator alone has no state of accumulation
        Accelerator(cpu=True, gradient_accumulation_steps=2 if has_own_steps else 3)
    for patch in reversed(patches) if is_nested else patches:
        patch.stop()
    if own is not None:
        assert describe() == before
        assert own.gradient_accumulation_steps == 3 and own.state.mixed_precision == "bf16"
        assert PartialState().device == own.device
    else:  # there is only the accelerator that was made when nothing but accumulation was patched
        assert bool(AcceleratorState._shared_state) == (order[0] == 2)


@pytest.mark.parametrize("kind", STATES)
def test_nested_patches_of_one_state(kind: Any) -> None:
    seen = []
    Accelerator(cpu=True, mixed_precision="bf16")
    for _ in range(3):
        seen.append(describe())
        patch = mock.patch.object(kind, "_shared_state", {})
        patch.start()
        seen[-1].append({"patch": patch})
        Accelerator(cpu=True)
    for *shown, patched in reversed(seen):
        patched["patch"].stop()  # type: ignore[attr-defined]
        assert describe() == shown


def test_monkeypatch_and_patches_of_dicts() -> None:
    Accelerator(cpu=True, mixed_precision="bf16")
    before = describe()
    for kind in STATES:
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(kind, "_shared_state", {})
            Accelerator(cpu=True)
            monkeypatch.setattr(kind, "_shared_state", {})
        assert describe() == before
        with mock.patch.dict(kind._shared_state, clear=True):
            Accelerator(cpu=True)
        assert describe() == before
    with mock.patch.dict(AcceleratorState._shared_state, {"debug": True}):
        assert AcceleratorState().debug
    assert describe() == before


def test_a_dict_that_was_read_is_the_states_own() -> None:
    """It shows what the state is, and what the state was after another dict took its place."""
    shared = PartialState._shared_state
    assert shared == {} and not shared and list(shared) == [] and {} == shared  # noqa: SIM300
    Accelerator(cpu=True)
    assert shared == PartialState._shared_state != {} and "device" in shared and isinstance(shared, dict)
    assert dict(shared) == {**shared} == shared | {} == {} | shared == dict(shared.items())
    PartialState._shared_state = {}
    assert PartialState._shared_state == {} and shared["device"] == torch.device("cpu")
    with pytest.raises(TypeError, match="has another _shared_state"):
        shared["debug"] = True
    PartialState._shared_state = shared
    assert PartialState._shared_state == shared and AcceleratorState().mixed_precision == "no"
    PartialState._shared_state = {}
    shared.clear()
    assert shared == {}
    PartialState._shared_state = shared
    assert PartialState._shared_state == {}


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, dict, lambda shared: shared.copy()])
def test_every_kind_of_copy_brings_the_state_back(copied: Any) -> None:
    Accelerator(cpu=True, mixed_precision="bf16")
    before = describe()
    copies = [copied(kind._shared_state) for kind in STATES]
    for kind, saved in zip(STATES, copies, strict=True):
        kind._shared_state = {}
        Accelerator(cpu=True)
        kind._shared_state = saved
        assert describe() == before
        assert copies == before
    PartialState().debug = True
    saved = PartialState._shared_state.copy()
    PartialState().debug = False
    PartialState._shared_state = {**saved, "distributed_type": DistributedType.FSDP}
    assert PartialState().debug and PartialState().distributed_type == "FSDP"


def test_a_state_on_its_own_keeps_none_alive() -> None:
    PartialState(cpu=True)
    shared = PartialState._shared_state
    gone = weakref.ref(runtime.current().comm)  # type: ignore[union-attr]
    PartialState._reset_state()
    gc.collect()
    assert gone() is None and shared == {}


def test_a_state_that_cannot_be_set_stays() -> None:
    own = Accelerator(cpu=True, mixed_precision="bf16")
    before = describe()
    for kind in STATES:
        for wrong in (
            {"num_processes": 5},
            {**kind._shared_state, "distributed_type": "MULTI", "num_processes": 7},
        ):
            with pytest.raises((AttributeError, ValueError)):
                kind._shared_state = wrong  # type: ignore[assignment]
            assert describe() == before
    assert own.state.mixed_precision == "bf16"


@pytest.mark.parametrize("kind", STATES)
def test_an_unknown_name_makes_no_runtime(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "ensure", None)
    with pytest.raises(AttributeError, match=f"'misspelt' is no part of {kind.__name__}"):
        kind._shared_state = {"misspelt": 1}


def test_an_interrupt_leaves_the_state_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    Accelerator(cpu=True, mixed_precision="bf16")
    before, ensure = describe(), detect.ensure

    def interrupt(*args: Any, **kwargs: Any) -> None:
        ensure(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(detect, "ensure", interrupt)
    with pytest.raises(KeyboardInterrupt):
        PartialState._shared_state = {"debug": True}
    assert describe() == before
    PartialState._reset_state()
    with pytest.raises(KeyboardInterrupt):
        PartialState._shared_state.update(debug=True)
    assert PartialState._shared_state == {}


def test_the_dict_of_another_class_brings_the_state_along() -> None:
    class Derived(PartialState):
        pass

    own = Accelerator(cpu=True, mixed_precision="bf16")
    for kind, other in ((Derived, PartialState), (PartialState, AcceleratorState)):
        with mock.patch.object(kind, "_shared_state", other._shared_state):
            assert runtime.current() is own._runtime and PartialState().num_processes == 1
        assert runtime.current() is own._runtime and own.state.mixed_precision == "bf16"


# --- what code finds that takes it for the plain dict of Accelerate -----------------------------------------------


@pytest.mark.parametrize("kind", STATES)
def test_a_patched_block_that_sets_the_dict_itself(kind: Any) -> None:
    Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=3)
    before = describe()
    with mock.patch.object(kind, "_shared_state", {}):
        Accelerator(cpu=True, gradient_accumulation_steps=2)
        kind._shared_state = {}
        Accelerator(cpu=True)
        kind._shared_state = {}
    assert describe() == before
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(kind, "_shared_state", {})
        kind._shared_state = {}
        Accelerator(cpu=True)
    assert describe() == before


def test_a_runtime_that_was_left_is_not_kept() -> None:
    PartialState(cpu=True)
    gone = weakref.ref(runtime.current().comm)  # type: ignore[union-attr]
    PartialState._shared_state = {}
    gc.collect()
    assert gone() is None


def test_a_reset_within_a_patch_is_undone() -> None:
    own = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=3)
    before = describe()
    for number, kind in enumerate(STATES):
        with mock.patch.object(kind, "_shared_state", {}):
            PartialState._reset_state()
            Accelerator(cpu=True, gradient_accumulation_steps=2)
        assert describe()[number] == before[number]
        assert kind is GradientState or describe() == before
    assert own.gradient_accumulation_steps == 3


def test_code_in_c_finds_the_values() -> None:
    Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=3)
    for kind in STATES:
        shared = kind._shared_state
        assert json.loads(json.dumps(shared, default=str)).keys() == set(shared) == set(vars(Holder(shared)))
        assert dict.__len__(shared) == len(shared) > 0
    assert vars(Holder(PartialState._shared_state))["num_processes"] == 1
    PartialState._reset_state()
    assert json.dumps(PartialState._shared_state) == "{}"
    assert dict.__len__(PartialState._shared_state) == 0


class Holder:
    """Shares its attributes with a state, as Accelerate's own states do."""

    def __init__(self, shared: Any) -> None:
        self.__dict__ = shared


def test_the_names_are_those_of_the_state() -> None:
    Accelerator(cpu=True)
    for kind in STATES:
        copied = kind._shared_state.copy()
        assert not any(name.startswith("_saved") for name in [*kind._shared_state, *copied])
        assert all(type(value).__name__ != "SavedState" for value in copied.values())
        assert kind._shared_state is kind._shared_state
    from accelerate.state import PartialState as Reference

    Reference(cpu=True)
    try:
        assert set(Reference._shared_state) - {"torch_device"} <= {*PartialState._shared_state}
    finally:
        Reference._reset_state()


def test_what_was_copied_does_not_change() -> None:
    state = Accelerator(cpu=True, gradient_accumulation_steps=3).gradient_state
    deep, pickled = copy.deepcopy(GradientState._shared_state), pickle.dumps(GradientState._shared_state)
    state.plugin_kwargs["num_steps"], state.sync_gradients = 5, False
    for saved in (deep, pickle.loads(pickled)):
        assert saved == {"sync_gradients": True, "plugin_kwargs": {"num_steps": 3}}
        assert type(saved) is type(saved["plugin_kwargs"]) is dict
    GradientState._shared_state = deep
    assert state.num_steps == 3 and state.sync_gradients
    PartialState().debug = True
    first = PartialState._shared_state.copy()
    second = copy.copy(first)
    shared = PartialState._shared_state
    PartialState._shared_state = {}
    shared.clear()
    PartialState._shared_state = second
    assert PartialState().debug and PartialState._shared_state == first


def test_the_dict_is_pickled_as_a_plain_one() -> None:
    Accelerator(cpu=True, mixed_precision="bf16")
    for kind in STATES:
        for saved in (kind._shared_state, kind._shared_state.copy()):
            other = pickle.loads(pickle.dumps(saved))
            assert (
                type(other) is dict
                and other == kind._shared_state
                and {type(name) for name in other} == {str}
            )


# --- subclasses of a user ----------------------------------------------------------------------------------------


def count_in_subclasses(library: Any) -> list[Any]:
    """Return what subclasses show that share attributes as the states of Accelerate do."""
    seen: list[Any] = []

    class Counting(library.PartialState):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__(cpu=True)
            self.__dict__ = self._shared_state
            if not hasattr(self, "count"):
                self.count = 0
            self.count += 1

    class OfItsOwn(library.PartialState):  # type: ignore[misc,name-defined]
        _shared_state: dict[str, Any] = {}  # noqa: RUF012

        def __init__(self) -> None:
            self.__dict__ = self._shared_state
            super().__init__(cpu=True)
            self.asked = getattr(self, "asked", 0) + 1

    class Choosing(library.AcceleratorState):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            self.__dict__ = self._shared_state
            self.colour = getattr(self, "colour", "") + "red"

    for kind in (Counting, OfItsOwn):
        kind()
        state = kind()
        seen.append(
            (vars(state).get("count"), vars(state).get("asked"), state.num_processes, state.device.type)
        )
        seen.append({"count", "asked", "num_processes", "device"} & kind._shared_state.keys())
        saved = copy.copy(kind._shared_state)
        kind._shared_state.clear()
        seen.append(kind._shared_state == {})
        kind._shared_state.update(saved)
        seen.append({"count", "asked", "num_processes"} & kind._shared_state.keys())
    library.PartialState._reset_state()
    library.Accelerator(cpu=True, mixed_precision="bf16")
    Choosing()
    seen.append((Choosing().colour, Choosing().mixed_precision, Choosing().num_processes))
    with mock.patch.object(Choosing, "_shared_state", {}):
        seen.append(library.PartialState().num_processes)
    seen.append((Choosing().colour, Choosing().initialized))
    library.AcceleratorState._reset_state(True)
    seen.append(library.PartialState._shared_state == library.AcceleratorState._shared_state == {})
    return seen


def test_subclasses_share_their_attributes_as_with_accelerate() -> None:
    import accelerate

    import notebook_accel

    reference = SimpleNamespace(
        PartialState=accelerate.PartialState,
        AcceleratorState=accelerate.state.AcceleratorState,
        Accelerator=accelerate.Accelerator,
    )
    own = SimpleNamespace(
        PartialState=PartialState, AcceleratorState=AcceleratorState, Accelerator=notebook_accel.Accelerator
    )
    assert count_in_subclasses(own) == count_in_subclasses(reference)
