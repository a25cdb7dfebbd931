"""Accelerators, states and what holds them are copied and pickled."""

from __future__ import annotations

import base64
import copy
import pickle
import subprocess
import sys
import threading
from typing import Any

import cloudpickle
import pytest
import torch
from torch.utils.data import DataLoader

from notebook_accel import Accelerator, FullyShardedDataParallelPlugin, PartialState, runtime
from notebook_accel.checkpointing.background import BackgroundWriter
from notebook_accel.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
)
from notebook_accel.state import AcceleratorState, GradientState
from tests.unit.multiprocess import run_ranks

PICKLERS = [pickle, cloudpickle]


def train_step(accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> torch.Tensor:
    """Return the weights after one step."""
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
    return next(model.parameters()).detach().clone()


def make_trained(**arguments: Any) -> tuple[Any, ...]:
    accelerator = Accelerator(cpu=True, **arguments)
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    prepared = accelerator.prepare(model, optimizer, DataLoader(list(range(6)), batch_size=2))
    train_step(accelerator, *prepared[:2])
    return accelerator, *prepared


@pytest.mark.usefixtures("clean_runtime")
def test_copies_are_of_the_same_run() -> None:
    """A deep copy is the accelerator itself, as in Accelerate: libraries deep-copy objects that hold one."""
    accelerator, *_ = make_trained()
    assert copy.deepcopy(accelerator) is accelerator
    assert copy.deepcopy({"trainer": [accelerator]})["trainer"][0] is accelerator
    other = copy.copy(accelerator)
    assert type(other) is Accelerator and other is not accelerator and vars(other) == vars(accelerator)
    other.step = 7
    assert accelerator.step != 7 and other._models is accelerator._models
    assert copy.deepcopy(runtime.current()) is copy.copy(runtime.current()) is runtime.current()


@pytest.mark.usefixtures("clean_runtime")
@pytest.mark.parametrize("library", PICKLERS, ids=lambda library: library.__name__)
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_an_accelerator_that_was_pickled_trains_on(library: Any, precision: str) -> None:
    accelerator, model, optimizer, _ = make_trained(mixed_precision=precision, gradient_accumulation_steps=1)
    other = pickle.loads(library.dumps(accelerator))
    assert other._runtime is accelerator._runtime and other.mixed_precision == precision
    assert other._models[0] is not model and other._optimizers[0] is not optimizer
    expected = train_step(accelerator, model, optimizer)
    assert torch.equal(train_step(other, other._models[0], other._optimizers[0]), expected)
    raw = torch.nn.Linear(2, 2)
    more = other.prepare(raw, torch.optim.SGD(raw.parameters(), 0.1))
    train_step(other, *more)


@pytest.mark.usefixtures("clean_runtime")
@pytest.mark.parametrize("library", PICKLERS, ids=lambda library: library.__name__)
def test_states_are_copied_and_pickled(library: Any) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=3)
    for state in (PartialState(), AcceleratorState(), GradientState(), accelerator.gradient_state):
        for other in (copy.copy(state), copy.deepcopy(state), pickle.loads(library.dumps(state))):
            assert type(other) is type(state) and repr(other) == repr(state)
    assert pickle.loads(library.dumps(GradientState())).num_steps == 3


ELSEWHERE = """
import base64, pickle, sys
try:
    accelerator = pickle.loads(base64.b64decode(sys.stdin.read()))
    kind = type(accelerator).__name__
    if kind == "Accelerator":
        weights = [value for model in accelerator._models for value in model.state_dict().values()]
        print(accelerator, accelerator.gradient_accumulation_steps, accelerator.state.initialized, len(weights))
    else:
        print(accelerator.device)
except Exception as error:
    print(type(error).__name__, error)
"""


def load_elsewhere(pickled: bytes, **variables: str) -> str:
    """Return what a process of its own says of a pickle."""
    from notebook_accel import environ

    with environ.patch_environment(**variables):
        done = subprocess.run(
            [sys.executable, "-c", ELSEWHERE],
            input=base64.b64encode(pickled).decode(),
            text=True,
            capture_output=True,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.usefixtures("clean_runtime")
def test_in_a_process_without_a_run_one_is_made() -> None:
    plugin = GradientAccumulationPlugin(num_steps=3, sync_each_batch=True)
    accelerator, *_ = make_trained(mixed_precision="bf16", gradient_accumulation_plugin=plugin)
    said = load_elsewhere(pickle.dumps(accelerator))
    assert said == "Accelerator(rank 0 of 1 on cpu, mixed_precision='bf16') 3 True 2\n"
    said = load_elsewhere(pickle.dumps(accelerator._runtime))
    assert "RuntimeError there is no runtime" in said and "make an Accelerator" in said
    assert load_elsewhere(pickle.dumps(PartialState())) == "cpu\n"


@pytest.mark.usefixtures("clean_runtime")
def test_a_later_run_that_differs_is_refused() -> None:
    pickled = pickle.dumps(Accelerator(cpu=True, mixed_precision="bf16"))
    runtime.reset()
    Accelerator(cpu=True)
    with pytest.raises(ValueError, match="'bf16' comes too late: the first Accelerator chose 'no'"):
        pickle.loads(pickled)
    runtime.reset()
    PartialState(cpu=True)
    assert pickle.loads(pickled).mixed_precision == "bf16" and AcceleratorState().mixed_precision == "bf16"
    runtime.current().device = torch.device("meta")  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="pickled where it trains on cpu, and this process trains on meta"):
        pickle.loads(pickled)


def ranks_pickle(pickled: bytes) -> list[Any]:
    with pytest.raises(ValueError, match="pickled in a run of 1 process, and this run has 2"):
        pickle.loads(pickled)
    assert not torch.distributed.is_initialized()
    PartialState(cpu=True)  # opens the group for all that follows: ranks cannot meet twice at one port
    runtime.reset()
    accelerator, model, optimizer, _ = make_trained()
    other = pickle.loads(pickle.dumps(accelerator))
    both = [
        train_step(accelerator, model, optimizer),
        train_step(other, other._models[0], other._optimizers[0]),
    ]
    assert torch.equal(*both)
    accelerator.end_training()
    runtime.reset()
    sharded = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    with pytest.raises(TypeError, match=r"by FSDP cannot be pickled.* save_state"):
        pickle.dumps(sharded)
    assert copy.deepcopy(sharded) is sharded and copy.copy(sharded).is_fsdp2
    return [value.tolist() for value in both]


@pytest.mark.usefixtures("clean_runtime")
def test_on_two_processes() -> None:
    pickled = pickle.dumps(Accelerator(cpu=True))
    first, second = run_ranks(ranks_pickle, pickled)
    assert first == second


def ranks_prepare_again(pickled: bytes) -> tuple[str, list[Any]]:
    model, optimizer, loader, scheduler = pickle.loads(pickled)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    for item, kind in ((optimizer, "SGD"), (loader, "DataLoaderShard"), (scheduler, "StepLR")):
        with pytest.raises(
            ValueError, match=f"this {kind} was prepared in a run of 1 process by .*, and this run has 2"
        ):
            accelerator.prepare(item)
    model = accelerator.prepare(model)
    assert accelerator.prepare(model) is model
    accelerator.backward(model(torch.full((1, 2), 1.0 + accelerator.process_index)).sum())
    bare = accelerator.unwrap_model(model)
    return type(model).__name__, [bare.weight.grad.tolist(), str(model(torch.ones(1, 2)).dtype)]


@pytest.mark.usefixtures("clean_runtime")
def test_what_was_prepared_for_one_process_is_not_taken_as_prepared_by_two() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(list(range(6)), batch_size=2)
    prepared = accelerator.prepare(model, optimizer, loader, torch.optim.lr_scheduler.StepLR(optimizer, 1))
    ends = run_ranks(ranks_prepare_again, pickle.dumps(prepared))
    assert ends == [("DistributedDataParallel", [[[1.5, 1.5], [1.5, 1.5]], "torch.float32"])] * 2


class Numbers:
    """A dataset that holds an accelerator, as those do that print in one process only."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> Any:
        own = self.accelerator
        with pytest.raises(RuntimeError, match="none of the 2 ranks of the run"):
            own.wait_for_everyone()
        place = (own.process_index, own.num_processes, str(own.device), torch.distributed.is_initialized())
        return number, own.mixed_precision, own.gradient_accumulation_steps, place


def ranks_have_spawned_workers() -> list[Any]:
    numbers: Any = Numbers(Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=3))
    loader = DataLoader(numbers, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    return list(loader)


@pytest.mark.usefixtures("clean_runtime")
def test_workers_of_a_data_loader_open_no_group() -> None:
    """They inherit the variables of their rank, whose place in the group is taken."""
    answers = run_ranks(ranks_have_spawned_workers, starts_others=True, start_method="spawn", timeout=120.0)
    assert answers == [
        [[number, "bf16", 3, [rank, 2, "cpu", False]] for number in range(4)] for rank in range(2)
    ]


class Noted(Accelerator):
    """An accelerator of the user's with a lock, which no pickle can have."""

    __slots__ = ("place",)

    def __init__(self) -> None:
        super().__init__(cpu=True)
        self.lock = threading.Lock()
        self.place = "here"

    def __getstate__(self) -> Any:
        return {**{name: value for name, value in vars(self).items() if name != "lock"}, "place": self.place}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self.lock = threading.Lock()


@pytest.mark.usefixtures("clean_runtime")
@pytest.mark.parametrize(
    "make", [copy.copy, lambda own: pickle.loads(pickle.dumps(own))], ids=["copy", "pickle"]
)
def test_a_derived_accelerator_has_a_state_of_its_own(make: Any) -> None:
    accelerator = Noted()
    other = make(accelerator)
    assert type(other) is Noted and other.place == "here" and other.lock is not accelerator.lock
    assert other.device == accelerator.device and other.prepare(torch.nn.Linear(1, 1)) is not None


class Slotted(Accelerator):
    """Has a slot, and leaves its state to the base."""

    __slots__ = ("place",)


class Renamed(Slotted):
    """Changes the state of the base."""

    def __getstate__(self) -> Any:
        named, slots = super().__getstate__()
        return named, {**slots, "place": f"copied from {slots['place']}"}


@pytest.mark.usefixtures("clean_runtime")
@pytest.mark.parametrize(("kind", "place"), [(Slotted, "here"), (Renamed, "copied from here")])
def test_slots_are_copied_and_a_checkpoint_being_written_is_not_pickled(kind: Any, place: str) -> None:
    accelerator = kind(cpu=True)
    accelerator.place, accelerator._writer = "here", BackgroundWriter()
    copied, pickled = copy.copy(accelerator), pickle.loads(pickle.dumps(accelerator))
    assert copied.place == pickled.place == place and type(pickled) is kind
    assert copied._writer is accelerator._writer and pickled._writer is None
    assert {"_writer", "_counts"} <= vars(accelerator).keys() == vars(pickled).keys()


class Observed(torch.nn.Linear):
    """Notes in which dtype it computes, before `prepare` converts that."""

    dtypes: list[torch.dtype]

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        made = super().forward(values)
        self.dtypes.append(made.dtype)
        return made


@pytest.mark.usefixtures("clean_runtime")
def test_handlers_of_a_copy_are_its_own() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    other = copy.copy(accelerator)
    other.autocast_handler = AutocastKwargs(enabled=False)
    options = other.ddp_handler = DistributedDataParallelKwargs(static_graph=True)
    assert accelerator.autocast_handler is accelerator.ddp_handler is None
    dtypes: list[torch.dtype] = []
    for one, handler in ((other, options), (accelerator, None), (other, options)):
        raw = Observed(2, 2)
        raw.dtypes = dtypes
        model = one.prepare(raw)
        assert accelerator._strategy.options is handler
        with one.autocast():
            dtypes.append(torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype)
        model(torch.ones(1, 2))
    assert dtypes == [torch.float32] * 2 + [torch.bfloat16] * 2 + [torch.float32] * 2
    assert accelerator._strategy is other._strategy


@pytest.mark.usefixtures("clean_runtime")
def test_optimizers_that_were_pickled_follow_their_parameters() -> None:
    """Torch can be told to make new parameters where a model moves, as it does on XLA devices."""
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), 0.1))
    other, model, optimizer = pickle.loads(pickle.dumps((accelerator, model, optimizer)))
    future = torch.__future__
    before = future.get_overwrite_module_params_on_conversion()
    future.set_overwrite_module_params_on_conversion(True)
    try:
        model = other.prepare(model)
    finally:
        future.set_overwrite_module_params_on_conversion(before)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert [id(parameter) for parameter in held] == [id(parameter) for parameter in model.parameters()]
    third, model, optimizer = pickle.loads(pickle.dumps((other, model, optimizer)))
    train_step(third, model, optimizer)
