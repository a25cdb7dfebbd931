"""AcceleratedScheduler: how often a call steps the schedule."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

from notebook_accel.comm.single import SingleComm
from notebook_accel.optimizer import AcceleratedOptimizer
from notebook_accel.runtime import Runtime
from notebook_accel.scheduler import AcceleratedScheduler
from notebook_accel.topology import Topology


@pytest.fixture(scope="module", autouse=True)
def _compiler_is_loaded() -> None:
    """Let torch load its compiler and set TORCHINDUCTOR_CACHE_DIR, as the first optimizer of a process does."""
    weight = nn.Parameter(torch.zeros(1))
    torch.optim.SGD([weight]).zero_grad()


def of_world(size: int) -> Runtime:
    topology = Topology(world_size=size, local_world_size=size)
    return Runtime(topology=topology, device=torch.device("cpu"), comm=SingleComm())


def make(runtime: Runtime, scaler: Any = None) -> tuple[nn.Parameter, AcceleratedOptimizer, LambdaLR]:
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    optimizer = AcceleratedOptimizer(torch.optim.SGD([weight], lr=1.0), scaler=scaler, runtime=runtime)
    return weight, optimizer, LambdaLR(optimizer.optimizer, lambda count: 1.0 / (1 + count))


@pytest.mark.parametrize("world", [1, 3])
def test_one_call_steps_once_for_each_process(world: int) -> None:
    runtime = of_world(world)
    _, optimizer, inner = make(runtime)
    scheduler = AcceleratedScheduler(inner, optimizer, runtime=runtime)
    for calls in (1, 2):
        optimizer.step()
        scheduler.step()
        assert inner.last_epoch == calls * world
        assert scheduler.get_last_lr() == [1.0 / (1 + calls * world)]


def test_split_batches_step_once() -> None:
    runtime = of_world(4)
    _, optimizer, inner = make(runtime)
    scheduler = AcceleratedScheduler(inner, [optimizer], split_batches=True, runtime=runtime)
    optimizer.step()
    scheduler.step()
    assert inner.last_epoch == 1


def test_a_scheduler_of_its_own_steps_at_every_call() -> None:
    runtime = of_world(4)
    runtime.gradient.sync_gradients = False
    _, optimizer, inner = make(runtime)
    scheduler = AcceleratedScheduler(inner, optimizer, step_with_optimizer=False, runtime=runtime)
    optimizer.optimizer.step()
    scheduler.step()
    assert inner.last_epoch == 1


@pytest.mark.parametrize("adjust", [True, False])
def test_accumulated_batches_do_not_step(adjust: bool) -> None:
    runtime = of_world(1)
    runtime.gradient.adjust_scheduler = adjust
    _, optimizer, inner = make(runtime)
    scheduler = AcceleratedScheduler(inner, optimizer, runtime=runtime)
    before = inner._step_count
    for sync in (False, False, True):
        runtime.gradient.sync_gradients = sync
        optimizer.step()
        scheduler.step()
    assert inner.last_epoch == 1
    assert inner._step_count == before + 1, "one that is counted more often ends OneCycleLR early"


def test_a_skipped_optimizer_step_holds_the_schedule() -> None:
    runtime = of_world(2)
    scaler = GradScaler("cpu", init_scale=4.0)
    weight, optimizer, inner = make(runtime, scaler)
    scheduler = AcceleratedScheduler(inner, optimizer, runtime=runtime)
    for value, expected in [(float("nan"), 0), (1.0, 2)]:
        optimizer.zero_grad()
        scaler.scale((weight * torch.tensor(value)).sum()).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
            scheduler.step()
        assert inner.last_epoch == expected


def test_one_cycle_stops_at_its_total_steps() -> None:
    runtime = of_world(4)
    _, optimizer, _ = make(runtime)
    inner = OneCycleLR(optimizer.optimizer, max_lr=1.0, total_steps=10)
    scheduler = AcceleratedScheduler(inner, optimizer, runtime=runtime)
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    assert inner._step_count == 11
    assert inner.last_epoch == 10


def test_a_metric_is_one_observation_whatever_the_processes() -> None:
    runtime = of_world(4)
    _, optimizer, _ = make(runtime)
    plateau = ReduceLROnPlateau(optimizer.optimizer, patience=2, factor=0.5)
    by_hand = ReduceLROnPlateau(
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), patience=2, factor=0.5
    )
    scheduler = AcceleratedScheduler(plateau, optimizer, runtime=runtime)
    for number in range(8):
        optimizer.step()
        runtime.gradient.sync_gradients = number % 2 == 0  # an epoch may end while gradients accumulate
        scheduler.step(metrics=1.0)
        by_hand.step(1.0)
        assert scheduler.get_last_lr() == by_hand.get_last_lr()
    runtime.gradient.num_blocks = 1
    scheduler.step(1.0)
    assert plateau.last_epoch == 8, "in a block of `accumulate` it waits, as all schedulers do"


def test_arguments_and_state_pass_through() -> None:
    runtime = of_world(1)
    _, optimizer, _ = make(runtime)
    plateau = ReduceLROnPlateau(optimizer.optimizer, patience=0, factor=0.1)
    scheduler = AcceleratedScheduler(plateau, optimizer, runtime=runtime)
    for loss in (1.0, 2.0):
        optimizer.step()
        scheduler.step(loss)
    assert scheduler.get_last_lr() == [pytest.approx(0.1)]
    state = scheduler.state_dict()
    assert state["last_epoch"] == 2
    scheduler.load_state_dict(state | {"last_epoch": 7})
    assert plateau.last_epoch == 7


@pytest.mark.filterwarnings("ignore:To get the last learning rate")
def test_rates_before_the_first_step() -> None:
    runtime = of_world(1)
    _, optimizer, inner = make(runtime)
    assert AcceleratedScheduler(inner, optimizer, runtime=runtime).get_lr() == [1.0]


def test_without_a_runtime_it_steps_once(clean_runtime: None) -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    inner = LambdaLR(optimizer, float)
    scheduler = AcceleratedScheduler(inner, optimizer)
    optimizer.step()
    scheduler.step()
    assert inner.last_epoch == 1


def test_it_pickles() -> None:
    runtime = of_world(1)
    _, optimizer, _ = make(runtime)
    inner = OneCycleLR(optimizer.optimizer, max_lr=1.0, total_steps=10)
    again = pickle.loads(pickle.dumps(AcceleratedScheduler(inner, optimizer, runtime=runtime)))
    assert again.scheduler.total_steps == 10


def test_an_overflow_that_is_set_by_hand_skips_the_schedule() -> None:
    """As tests of libraries set it."""
    optimizer = AcceleratedOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0))
    scheduler = AcceleratedScheduler(LambdaLR(optimizer.optimizer, lambda step: 1 - step / 10), optimizer)
    for overflow, rate in ((False, 0.9), (True, 0.9), (False, 0.8)):
        optimizer._is_overflow = overflow
        scheduler.step()
        assert scheduler.get_last_lr() == [rate] and optimizer.step_was_skipped == overflow
