"""AcceleratedOptimizer: when it steps, and that it is the wrapped optimizer in all else."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import StepLR

from notebook_accel.comm.single import SingleComm
from notebook_accel.optimizer import AcceleratedOptimizer
from notebook_accel.runtime import Runtime
from notebook_accel.topology import Topology


@pytest.fixture(scope="module", autouse=True)
def _compiler_is_loaded() -> None:
    """Let torch load its compiler and set TORCHINDUCTOR_CACHE_DIR, as the first optimizer of a process does."""
    weight = nn.Parameter(torch.zeros(1))
    torch.optim.SGD([weight]).zero_grad()


@pytest.fixture
def alone() -> Runtime:
    return Runtime(topology=Topology(), device=torch.device("cpu"), comm=SingleComm())


def with_gradient(value: float = 1.0) -> tuple[nn.Parameter, torch.optim.SGD]:
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.full((2,), value)
    return weight, torch.optim.SGD([weight], lr=1.0, momentum=0.9)


def test_nothing_happens_while_gradients_accumulate(alone: Runtime) -> None:
    weight, inner = with_gradient()
    optimizer = AcceleratedOptimizer(inner, runtime=alone)
    alone.gradient.sync_gradients = False
    optimizer.step()
    optimizer.zero_grad()
    assert weight.tolist() == [0, 0]
    assert weight.grad is not None
    alone.gradient.sync_gradients = True
    optimizer.step()
    assert weight.tolist() == [-1, -1]
    optimizer.zero_grad(set_to_none=False)
    assert weight.grad.tolist() == [0, 0]
    optimizer.zero_grad()
    assert weight.grad is None


def test_without_a_runtime_it_always_steps(clean_runtime: None) -> None:
    weight, inner = with_gradient()
    AcceleratedOptimizer(inner).step()
    assert weight.tolist() == [-1, -1]


def test_closure_and_its_loss_pass_through(alone: Runtime) -> None:
    _, inner = with_gradient()
    assert AcceleratedOptimizer(inner, runtime=alone).step(lambda: 3.5) == 3.5


def test_everything_else_is_the_wrapped_optimizer(alone: Runtime) -> None:
    _, inner = with_gradient()
    optimizer = AcceleratedOptimizer(inner, runtime=alone)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.5})
    assert [group["lr"] for group in inner.param_groups] == [1.0, 0.5]
    optimizer.param_groups = inner.param_groups[:1]
    assert len(inner.param_groups) == 1
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    optimizer.step()
    assert calls == [1]
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(optimizer, "no_such_" + "name")


def test_state_goes_out_and_in(alone: Runtime) -> None:
    _, inner = with_gradient()
    optimizer = AcceleratedOptimizer(inner, runtime=alone)
    optimizer.step()
    saved = optimizer.state_dict()
    weight, fresh = with_gradient()
    restored = AcceleratedOptimizer(fresh, runtime=alone)
    restored.load_state_dict(saved)
    assert restored.state[weight]["momentum_buffer"].tolist() == [1, 1]


def test_state_that_exists_follows_the_parameters(alone: Runtime) -> None:
    weight, inner = with_gradient()
    inner.step()
    inner.state[weight]["momentum_buffer"] = inner.state[weight]["momentum_buffer"].double()
    AcceleratedOptimizer(inner, device_placement=False, runtime=alone)
    assert inner.state[weight]["momentum_buffer"].dtype == torch.float64
    AcceleratedOptimizer(inner, runtime=alone)
    assert inner.state[weight]["momentum_buffer"].dtype == torch.float32


@pytest.mark.parametrize("fused", [False, True])
def test_scaler_skips_a_step_with_infinite_gradients(alone: Runtime, fused: bool) -> None:
    weight = nn.Parameter(torch.zeros(2))
    inner = torch.optim.SGD([weight], lr=1.0, fused=fused)
    scaler = GradScaler("cpu", init_scale=4.0)
    optimizer = AcceleratedOptimizer(inner, scaler=scaler, runtime=alone)
    for value, skipped, expected in [(1.0, False, -1.0), (float("inf"), True, -1.0), (1.0, False, -2.0)]:
        optimizer.zero_grad()
        scaler.scale((weight * torch.tensor(value)).sum()).backward()
        optimizer.step()
        assert optimizer.step_was_skipped is skipped
        assert weight.tolist() == [expected, expected]
    assert scaler.get_scale() == 2.0
    assert not inner._optimizer_step_post_hooks


def test_a_disabled_scaler_never_skips(alone: Runtime) -> None:
    weight, inner = with_gradient()
    optimizer = AcceleratedOptimizer(inner, scaler=GradScaler("cpu", enabled=False), runtime=alone)
    optimizer.step()
    assert weight.tolist() == [-1, -1]
    assert not optimizer.step_was_skipped


def test_modes_reach_optimizers_that_know_them(alone: Runtime) -> None:
    class ScheduleFree(torch.optim.SGD):
        mode = ""

        def train(self) -> None:
            self.mode = "train"

        def eval(self) -> None:
            self.mode = "eval"

    _, plain = with_gradient()
    AcceleratedOptimizer(plain, runtime=alone).train()
    inner = ScheduleFree([nn.Parameter(torch.ones(1))])
    optimizer = AcceleratedOptimizer(inner, runtime=alone)
    optimizer.train()
    assert inner.mode == "train"
    optimizer.eval()
    assert inner.mode == "eval"


def test_zero_grad_of_an_optimizer_without_set_to_none(alone: Runtime) -> None:
    class Old(torch.optim.SGD):
        cleared = 0

        def zero_grad(self) -> None:  # type: ignore[override]
            self.cleared += 1

    inner = Old([nn.Parameter(torch.ones(1))])
    optimizer = AcceleratedOptimizer(inner, runtime=alone)
    optimizer.zero_grad()
    assert inner.cleared == 1
    with pytest.raises(ValueError, match="Old does not take set_to_none=True"):
        optimizer.zero_grad(set_to_none=True)


def test_it_pickles_and_carries_schedulers(alone: Runtime) -> None:
    _, inner = with_gradient()
    optimizer = AcceleratedOptimizer(inner, scaler=GradScaler("cpu"), runtime=alone)
    again = pickle.loads(pickle.dumps(optimizer))
    assert again.param_groups[0]["lr"] == 1.0
    again.scaler.scale((again.param_groups[0]["params"][0] * 2).sum()).backward()
    again.step()
    assert again.param_groups[0]["params"][0].tolist() != [0, 0]
    scheduler = StepLR(AcceleratedOptimizer(inner, runtime=alone), step_size=1, gamma=0.5)
    scheduler.optimizer.step()
    scheduler.step()
    assert inner.param_groups[0]["lr"] == 0.5
