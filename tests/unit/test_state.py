"""PartialState and its relatives, alone and on two processes."""

from __future__ import annotations

import contextlib
import io
import os
import threading
from contextlib import redirect_stdout
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from notebook_accel import Accelerator, runtime
from notebook_accel.runtime import GradientFlags
from notebook_accel.state import AcceleratorState, DistributedType, PartialState
from tests.unit.multiprocess import run_ranks


class Loader:
    iteration = 1
    batches_seen = 2
    length = 3


def test_alone(clean_runtime: None) -> None:
    state = PartialState(cpu=True)
    assert state.distributed_type == DistributedType.NO == "NO"
    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)
    assert state.device == torch.device("cpu") and state.backend is None
    assert state.is_main_process and state.is_local_main_process and state.is_last_process
    assert not state.use_distributed and not dist.is_initialized()
    state.wait_for_everyone()
    with state.split_between_processes([1, 2]) as part:
        assert part == [1, 2]


def test_it_is_a_view(clean_runtime: None) -> None:
    first, second = PartialState(cpu=True), PartialState()
    assert first.device is second.device and first.initialized
    PartialState._reset_state()
    assert runtime.current() is None and not first.initialized
    with pytest.raises(RuntimeError, match="the state was reset"):
        _ = first.device
    assert "reset" in repr(first)


def test_what_the_accelerators_state_shows_of_itself(clean_runtime: None) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    state = accelerator.state
    assert repr(state).endswith("Device: cpu\n\nMixed precision type: bf16\n")
    PartialState._reset_state()
    assert repr(state) == "AcceleratorState(reset)"


def test_a_thread_can_have_a_runtime_of_its_own(clean_runtime: None) -> None:
    PartialState(cpu=True)
    shared = runtime.current()
    assert shared is not None
    own = runtime.Runtime(topology=shared.topology, device=torch.device("meta"), comm=shared.comm)
    seen: list[Any] = []

    def work() -> None:
        seen.append(runtime.current())
        runtime.install(own, for_thread=True)
        seen.append(PartialState().device.type)
        runtime.reset()
        seen.append(runtime.current())
        seen.append(PartialState(cpu=True).device.type)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [shared, "meta", None, "cpu"]
    assert runtime.current() is shared
    assert PartialState().device.type == "cpu"


def test_no_thread_of_a_fork_has_a_runtime_of_its_parent(clean_runtime: None) -> None:
    PartialState(cpu=True)
    shared, seen = runtime.current(), []
    assert shared is not None

    def work() -> None:
        runtime.install(shared, for_thread=True)
        runtime.forget()
        seen.append(runtime.current())
        PartialState(cpu=True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None]
    assert runtime.current() not in (None, shared), "the one that the fork made is that of all its threads"


def test_wrong_arguments(clean_runtime: None) -> None:
    with pytest.raises(TypeError, match="backend, init_method, timeout"):
        PartialState(cpu=True, colour="red")
    with pytest.raises(TypeError, match="timedelta"):
        PartialState(cpu=True, timeout=5)
    with pytest.raises(ValueError, match=r"make an Accelerator\(\)"):
        AcceleratorState(cpu=True)


def test_inconsistent_variables(clean_runtime: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="RANK 3 >= WORLD_SIZE 2"):
        PartialState(cpu=True)
    assert runtime.current() is None


def test_cpu_comes_too_late_for_another_device(clean_runtime: None) -> None:
    PartialState(cpu=True)
    installed = runtime.current()
    assert installed is not None
    installed.device = torch.device("meta")
    with pytest.raises(ValueError, match=r"cpu=True comes too late.*meta"):
        PartialState(cpu=True)


def test_several_nodes_need_an_address(clean_runtime: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "OMP_NUM_THREADS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ValueError, match="2 nodes and MASTER_ADDR is not set"):
        PartialState(cpu=True)


def test_gradient_flags_follow_the_loader_of_the_last_batch() -> None:
    flags = GradientFlags()
    assert (flags.end_of_dataloader, flags.remainder, flags.active) == (False, -1, None)
    outer, inner = Loader(), Loader()
    first, second = flags.begin(outer), flags.begin(inner)
    first.remainder, second.remainder, second.is_last = 2, 3, True
    flags.give_turn(first)
    flags.give_turn(second)
    assert flags.active is inner and flags.end_of_dataloader and flags.remainder == 3
    flags.give_turn(first)
    assert flags.active is outer and not flags.end_of_dataloader and flags.remainder == 2
    flags.end(first)
    assert flags.active is None and flags.iterations == []


def test_gradient_flags_forget_a_loader_that_is_gone() -> None:
    flags = GradientFlags()
    loader = Loader()
    flags.give_turn(flags.begin(loader))
    assert flags.position() == (1, 2, 3)
    del loader
    assert flags.active is None and not flags.end_of_dataloader and flags.position() == (0, 0, None)


# --- two processes -----------------------------------------------------------------------------------------------


def ranks_state() -> dict[str, Any]:
    state = PartialState(timeout=timedelta(seconds=50))
    rank = state.process_index
    assert state.num_processes == 2 and state.distributed_type == DistributedType.MULTI_CPU
    assert state.backend == "gloo" and state.use_distributed and state.is_last_process == (rank == 1)
    PartialState(timeout=timedelta(seconds=50))
    for arguments in ({"timeout": timedelta(seconds=9)}, {"backend": "mpi"}):
        with pytest.raises(ValueError, match="comes too late"):
            PartialState(**arguments)
    seen: dict[str, Any] = {}
    for name, inputs in {
        "list": [1, 2, 3],
        "tuple": (1, 2, 3),
        "tensor": torch.arange(3),
        "dict": {"a": [1, 2, 3], "b": torch.arange(3)},
        "one": [1],
        "none": [],
    }.items():
        for padding in (False, True):
            with state.split_between_processes(inputs, apply_padding=padding) as part:
                seen[f"{name} {padding}"] = part
    with (
        pytest.raises(ValueError, match="must have one length"),
        state.split_between_processes({"a": [1], "b": []}),
    ):
        pass
    text = io.StringIO()
    with redirect_stdout(text):
        state.print("hello")
    seen["printed"] = text.getvalue()
    seen["runs"] = [
        state.on_main_process(lambda: rank)(),
        state.on_last_process(lambda: rank)(),
        state.on_process(process_index=1)(lambda: rank)(),
        state.on_local_process(lambda: rank, local_process_index=0)(),
    ]
    return seen


def test_two_processes() -> None:
    first, second = run_ranks(ranks_state)
    assert (first["list False"], second["list False"]) == ([1, 2], [3])
    assert (first["list True"], second["list True"]) == ([1, 2], [3, 3])
    assert (first["tuple True"], second["tuple True"]) == ((1, 2), (3, 3))
    assert (first["tensor True"].tolist(), second["tensor True"].tolist()) == ([0, 1], [2, 2])
    assert second["tensor False"].tolist() == [2]
    assert second["dict True"]["a"] == [3, 3] and second["dict True"]["b"].tolist() == [2, 2]
    assert (first["one False"], second["one False"], second["one True"]) == ([1], [], [1])
    assert first["none True"] == second["none True"] == []
    assert (first["printed"], second["printed"]) == ("hello\n", "")
    assert first["runs"] == [0, None, None, 0] and second["runs"] == [None, 1, 1, None]


def ranks_turns(folder: str) -> list[str]:
    state = PartialState()
    log = os.path.join(folder, "log")
    with state.main_process_first(), open(log, "a") as file:
        file.write(f"{state.process_index}\n")
    state.wait_for_everyone()
    fails = pytest.raises(KeyError, match="first") if state.is_main_process else contextlib.nullcontext()
    with fails, state.local_main_process_first():  # a failing first process lets the others go on
        if state.is_main_process:
            raise KeyError("first")
    with open(log) as file:
        return file.read().split()


def test_the_main_process_goes_first(tmp_path: Any) -> None:
    assert run_ranks(ranks_turns, str(tmp_path)) == [["0", "1"]] * 2


def ranks_existing_group() -> tuple[Any, ...]:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    state = PartialState()
    assert state.process_index == rank
    installed = runtime.current()
    assert installed is not None
    installed.comm.close()
    assert dist.is_initialized(), "the user's group stays"
    return state.num_processes, state.local_process_index, state.backend


def test_a_group_of_the_user_is_used() -> None:
    assert run_ranks(ranks_existing_group) == [(2, 0, "gloo"), (2, 1, "gloo")]


def ranks_plain() -> tuple[int, int]:
    state = PartialState()
    state.wait_for_everyone()  # a rank that ends at once would reset the connections that others still make
    return state.num_processes, state.local_process_index


def test_processes_are_ranks_without_any_accelerate_variable() -> None:
    nothing_said = {"ACCELERATE_USE_CPU": "false", "CUDA_VISIBLE_DEVICES": ""}
    assert run_ranks(ranks_plain, environment=nothing_said) == [(2, 0), (2, 1)]
    assert run_ranks(ranks_plain, world_size=3)[2] == (3, 2)


def ranks_wrong_backend() -> str:
    with pytest.raises(ValueError, match=r"'nccl' does not work .* choose gloo"):
        PartialState(cpu=True, backend="nccl")
    return PartialState(cpu=True, backend="gloo").backend or ""


def test_a_backend_that_does_not_fit() -> None:
    assert run_ranks(ranks_wrong_backend) == ["gloo", "gloo"]


def test_an_accelerator_whose_state_was_reset_knows_its_processes_and_prepares_nothing(
    clean_runtime: None,
) -> None:
    accelerator = Accelerator(cpu=True)
    AcceleratorState._reset_state()
    assert accelerator.is_local_main_process and accelerator.is_main_process
    assert (accelerator.num_processes, accelerator.process_index) == (1, 0)
    with pytest.raises(AttributeError, match=r"This happens if `AcceleratorState._reset_state\(\)`"):
        accelerator.prepare(torch.nn.Linear(1, 1))
    assert Accelerator(cpu=True).num_processes == accelerator.num_processes == 1
