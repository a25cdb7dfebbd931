"""Attributes of states as Accelerate has them: shared, patched, set, and missing after a reset."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from notebook_accel import Accelerator, PartialState
from notebook_accel.state import AcceleratorState, GradientState
from tests.guards import ProcessGroup

STATES = (PartialState, AcceleratorState, GradientState)


@pytest.fixture(autouse=True)
def clean_states(clean_runtime: None) -> Iterator[None]:
    """Take down Accelerate's states too."""
    yield
    theirs = importlib.import_module("accelerate.state")
    theirs.AcceleratorState._reset_state(True)
    theirs.GradientState._reset_state()
    ProcessGroup().restore(False)


def after_reset(library: Any) -> list[Any]:
    states = [library.PartialState(cpu=True), library.Accelerator(cpu=True).state]
    library.state.AcceleratorState._reset_state(True)
    seen: list[Any] = []
    for state in states:
        seen += [hasattr(state, "device"), getattr(state, "num_processes", None), hasattr(state, "nope")]
        seen.append(bool(inspect.getmembers(state)))
    return seen


def set_attributes(library: Any) -> list[Any]:
    state = library.PartialState(cpu=True)
    seen: list[Any] = [state._cpu, "_cpu" in dir(state), isinstance(vars(state), dict)]
    state.foo = 1
    seen += [library.PartialState().foo, "foo" in vars(library.PartialState())]
    state.device = torch.device("meta")
    seen.append(library.PartialState().device)
    state.device = torch.device("cpu")
    state.num_processes, state.process_index, state.local_process_index = 4, 2, 2
    other = library.PartialState()
    seen += [other.num_processes, other.process_index, other.is_main_process, other.is_last_process]
    seen += [other.use_distributed, str(other.distributed_type), other.is_local_main_process]
    with other.split_between_processes(list(range(8))) as part:
        seen.append(part)
    library.PartialState._reset_state()
    seen.append(hasattr(library.PartialState(cpu=True), "foo"))
    return seen


def patch_attributes(library: Any) -> list[Any]:
    state = library.PartialState(cpu=True)
    seen: list[Any] = []
    for name, value in {
        "num_processes": 4,
        "process_index": 3,
        "device": torch.device("meta"),
        "debug": True,
    }.items():
        with mock.patch.object(state, name, value):
            seen += [getattr(state, name), getattr(library.PartialState(), name)]
        with mock.patch.dict(state.__dict__, {name: value}):
            seen.append(getattr(state, name))
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(state, name, value)
            seen.append(getattr(library.PartialState(), name))
        seen.append(getattr(state, name))
    accelerator = library.Accelerator(cpu=True)
    accelerator.state._mixed_precision = "bf16"
    return [*seen, accelerator.state.mixed_precision, accelerator.state._mixed_precision]


def copy_states(library: Any) -> list[Any]:
    accelerator = library.Accelerator(cpu=True)
    seen: list[Any] = []
    for state in (library.PartialState(), accelerator.state, library.state.GradientState()):
        state.colour = "red"
        for other in (copy.copy(state), copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
            seen += [other.colour, "device" in vars(other), "sync_gradients" in vars(other)]
    return seen


@pytest.mark.parametrize("look", [after_reset, set_attributes, patch_attributes, copy_states])
def test_attributes_are_as_with_accelerate(look: Any) -> None:
    own, reference = (importlib.import_module(name) for name in ("notebook_accel", "accelerate"))
    importlib.import_module("notebook_accel.state")
    assert look(own) == look(reference)


def test_a_state_that_was_reset_says_so() -> None:
    state = PartialState(cpu=True)
    PartialState._reset_state()
    for kind in (RuntimeError, AttributeError):
        with pytest.raises(kind, match="the state was reset: make a new PartialState"):
            _ = state.device


@pytest.mark.parametrize("kind", STATES)
def test_code_that_looks_without_calling_finds_what_the_class_defines(kind: Any) -> None:
    assert inspect.getattr_static(kind, "__init__") is vars(kind)["__init__"]


LOADS = """
import pickle, sys
states = pickle.loads(sys.stdin.buffer.read())
for state in states:
    print(state.num_processes, state.process_index, state.device, state.use_distributed)
    print(state.distributed_type, state.backend, state.debug, type(state).__name__)
print(repr(states[0]))
print(states[1].mixed_precision, states[1].dynamo_plugin.backend, states[0].colour, states[0].is_main_process)
"""


def pickle_states(library: Any) -> bytes:
    """Return a pickle of two states of a run that seems to have three processes."""
    accelerator = library.Accelerator(cpu=True, mixed_precision="bf16")
    states = library.PartialState(), accelerator.state
    for state in states:
        state.colour, state.num_processes, state.process_index = "red", 3, 2
    return pickle.dumps(states)


@pytest.mark.parametrize("made", ["accelerate", "notebook_accel"])
def test_a_process_without_a_run_shows_what_was_pickled_in_another(made: str) -> None:
    pickled = pickle_states(importlib.import_module(made))
    shown = {}
    for library in ("accelerate", "notebook_accel"):
        content = pickled if made == library else pickle_states(importlib.import_module(library))
        start = ""
        if library == "notebook_accel":  # in a process where it stands for Accelerate
            start, content = "import notebook_accel; notebook_accel.take_over_accelerate()\n", pickled
        done = subprocess.run([sys.executable, "-c", start + LOADS], input=content, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
        # Accelerate's kinds lose their prefix in an f-string of Python 3.10
        shown[library] = done.stdout.decode().replace("DistributedType.", "").splitlines()
    assert shown["notebook_accel"] == shown["accelerate"]


def test_a_run_that_begins_later_counts_for_states_that_were_unpickled_before() -> None:
    from notebook_accel import runtime

    state = PartialState(cpu=True)
    state.num_processes, state.process_index = 3, 2
    pickled = pickle.dumps(state)
    PartialState._reset_state()
    loaded = pickle.loads(pickled)
    assert (loaded.num_processes, pickle.loads(pickle.dumps(loaded)).num_processes) == (3, 3)
    assert runtime.current() is None and PartialState._shared_state == {}
    with pytest.raises(RuntimeError):
        loaded.wait_for_everyone()
    loaded.num_processes = 4
    assert loaded.num_processes == 4
    PartialState(cpu=True)
    assert loaded.num_processes == 1 and pickle.loads(pickled).num_processes == 1


def test_a_copy_of_a_state_without_a_runtime_has_its_attributes() -> None:
    state = PartialState(cpu=True)
    state.colour = "red"  # type: ignore[attr-defined]
    pickled = pickle.dumps(state)
    PartialState._reset_state()
    assert pickle.loads(pickled).colour == "red" and PartialState._shared_state == {}


class Resetting:
    """Resets the state after a number of its values were read, as another thread may at any time."""

    def __init__(self, number: int) -> None:
        self.left = number

    def count(self) -> None:
        self.left -= 1
        if self.left == 0:
            thread = threading.Thread(target=PartialState._reset_state)
            thread.start()
            thread.join()


def test_a_reset_by_another_thread_while_the_dict_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from notebook_accel import runtime

    current = runtime.current
    for kind in (PartialState, AcceleratorState):
        for number in range(1, 40):
            Accelerator(cpu=True)
            resetting = Resetting(number)

            def look(resetting: Resetting = resetting) -> Any:
                resetting.count()
                return current()

            with monkeypatch.context() as patched:
                patched.setattr(runtime, "current", look)
                read = dict(kind._shared_state)
            assert not read or "device" in read
            PartialState._reset_state()
