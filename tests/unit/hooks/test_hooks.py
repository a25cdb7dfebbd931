"""Hooks around a module's forward, beside Accelerate's."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import accelerate.hooks as theirs
import pytest
import torch
from accelerate.big_modeling import attach_layerwise_casting_hooks as their_casting
from torch import nn

from notebook_accel.accelerator import Accelerator
from notebook_accel.hooks import (
    LayerwiseCastingHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    attach_layerwise_casting_hooks,
    remove_hook_from_module,
    remove_hook_from_submodules,
)


class Plus(ModelHook):
    """Adds to the input, multiplies the output, and notes what happens to it."""

    def __init__(self, number: float = 1.0) -> None:
        self.number = number
        self.events: list[str] = []

    def init_hook(self, module: nn.Module) -> nn.Module:
        self.events.append("init")
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (args[0] + self.number, *args[1:]), kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output * (self.number + 1)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        self.events.append("detach")
        return module


class NoGrad(ModelHook):
    no_grad = True


class Net(nn.Module):
    """A layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """Scale it."""
        y: torch.Tensor = self.layer(x) * scale
        return y


X = torch.arange(6.0).reshape(2, 3)


def test_a_hook_sees_arguments_and_output() -> None:
    model = Net()
    assert add_hook_to_module(model, Plus()) is model
    torch.testing.assert_close(model(X, scale=3.0), Net.forward(model, X + 1, scale=3.0) * 2)
    assert str(inspect.signature(model.forward)) == str(inspect.signature(Net().forward))
    assert (model.forward.__name__, model.forward.__doc__) == ("forward", "Scale it.")
    assert set(model.state_dict()) == set(Net().state_dict())
    assert remove_hook_from_module(model) is model
    assert vars(model).keys() == vars(Net()).keys() and model.forward.__func__ is Net.forward


@pytest.mark.parametrize("append", [False, True])
def test_results_and_attributes_are_accelerates(append: bool) -> None:
    ours, other = Net(), Net()
    other.load_state_dict(ours.state_dict())

    class Theirs(Plus, theirs.ModelHook):  # type: ignore[misc]
        pass

    for number in (1.0, 2.0):
        add_hook_to_module(ours, Plus(number), append=append)
        theirs.add_hook_to_module(other, Theirs(number), append=append)
        torch.testing.assert_close(ours(X), other(X))
        assert {"_hf_hook", "_old_forward", "forward"} <= vars(ours).keys() & vars(other).keys()
    assert (
        isinstance(ours._hf_hook, SequentialHook)
        is isinstance(other._hf_hook, theirs.SequentialHook)
        is append
    )
    remove_hook_from_module(ours)
    theirs.remove_hook_from_module(other)
    torch.testing.assert_close(ours(X), other(X))


def test_events() -> None:
    model, first, second, third = Net(), Plus(), Plus(), Plus()
    add_hook_to_module(model, first)
    add_hook_to_module(model, second)
    add_hook_to_module(model, third, append=True)
    assert model._hf_hook.hooks == (second, third)
    remove_hook_from_module(model)
    remove_hook_from_module(model)
    assert first.events == second.events == third.events == ["init", "detach"]


def test_no_grad_also_within_a_sequence() -> None:
    model = Net()
    assert model(X).requires_grad
    add_hook_to_module(model, NoGrad())
    assert not model(X).requires_grad
    add_hook_to_module(model, Plus(), append=True)
    assert not model(X).requires_grad
    assert torch.is_grad_enabled()


def test_wrong_arguments_change_nothing() -> None:
    model = Net()
    with pytest.raises(TypeError, match="instance of ModelHook"):
        add_hook_to_module(model, Plus)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"to a torch\.nn\.Module"):
        add_hook_to_module(print, Plus())  # type: ignore[arg-type]
    assert "forward" not in vars(model)


def test_a_forward_of_the_instance_comes_back() -> None:
    def own(x: torch.Tensor) -> torch.Tensor:
        return x - 1

    model = Net()
    vars(model)["forward"] = own
    add_hook_to_module(model, Plus())
    assert torch.equal(model(X), X * 2)
    remove_hook_from_module(model)
    assert vars(model)["forward"] is own and "_old_forward" not in vars(model)


def test_what_was_wrapped_around_a_hooked_forward_stays() -> None:
    model = Net()
    plain = model(X)
    add_hook_to_module(model, Plus())
    inner = model.forward
    vars(model)["forward"] = lambda x: inner(x) + 5
    remove_hook_from_module(model)
    torch.testing.assert_close(model(X), plain + 5)


def test_copies_and_pickles_are_on_their_own() -> None:
    model = nn.Sequential(Net(), nn.ReLU())
    add_hook_to_module(model[0], Plus())
    add_hook_to_module(model, Plus(2.0))
    wanted = model(X)
    for made in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        pickle.loads(pickle.dumps(model.forward)).module,
    ):
        with torch.no_grad():
            assert torch.equal(made(X), wanted)
            made[0].layer.weight.zero_()
            assert not torch.equal(made(X), wanted) and torch.equal(model(X), wanted)
        remove_hook_from_submodules(made)
        assert "forward" not in vars(made) and "forward" not in vars(made[0])
        assert "forward" in vars(model) and "forward" in vars(model[0])


def test_removal_from_all_modules() -> None:
    model = nn.Sequential(Net(), Net())
    for part in (model, model[0], model[0].layer):
        add_hook_to_module(part, Plus())
    remove_hook_from_module(model)
    assert "_hf_hook" not in vars(model) and "_hf_hook" in vars(model[0].layer)
    remove_hook_from_module(model, recurse=True)
    assert not any("_hf_hook" in vars(part) or "forward" in vars(part) for part in model.modules())


def test_graphs_stay_editable() -> None:
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3)))
    add_hook_to_module(graph, Plus())
    before = graph(X)
    output = next(node for node in graph.graph.nodes if node.op == "output")
    with graph.graph.inserting_before(output):
        output.args = (graph.graph.call_function(torch.neg, output.args),)
    graph.recompile()
    assert torch.equal(graph(X), -before)
    remove_hook_from_module(graph)
    assert torch.equal(graph(X + 1) * 2, -before)


def test_a_hooked_module_compiles_into_one_graph() -> None:
    model = nn.Sequential(Net(), nn.ReLU())
    add_hook_to_module(model[0], Plus())
    add_hook_to_module(model[0], Plus(2.0), append=True)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), model(X))
    torch._dynamo.reset()


def test_layerwise_casting_is_accelerates() -> None:
    torch.manual_seed(0)
    ours = nn.ModuleDict({"a": nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), "norm_proj": nn.Linear(4, 4)})
    other = copy.deepcopy(ours)
    arguments: Any = (torch.float8_e4m3fn, torch.float32, ["norm"])
    attach_layerwise_casting_hooks(ours, *arguments)
    their_casting(other, *arguments)
    assert [p.dtype for p in ours.parameters()] == [p.dtype for p in other.parameters()]
    assert (
        ours["a"][0].weight.dtype == torch.float8_e4m3fn and ours["norm_proj"].weight.dtype == torch.float32
    )
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(ours["a"](X), other["a"](X))
            assert ours["a"][0].weight.dtype == torch.float8_e4m3fn
    remove_hook_from_submodules(ours)
    assert ours["a"][0].weight.dtype == torch.float32  # so that the layer can be used


def test_layerwise_casting_choices() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Conv1d(1, 1, 1)), nn.Embedding(2, 2))
    attach_layerwise_casting_hooks(
        model, torch.bfloat16, torch.float32, skip_modules_pattern="^0$", skip_modules_classes=(nn.Conv1d,)
    )
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    with pytest.raises(
        ValueError, match=r"storage_dtype is a floating point dtype of torch, not torch\.int8"
    ):
        attach_layerwise_casting_hooks(model, torch.int8, torch.float32)
    hook = LayerwiseCastingHook(torch.bfloat16, torch.float32, non_blocking=False)
    add_hook_to_module(model[0], hook)
    compiled = torch.compile(model[0], backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(X[:, :2]), model[0](X[:, :2]))
    assert model[0].weight.dtype == torch.bfloat16
    torch._dynamo.reset()


def test_hooks_and_mixed_precision_in_either_order(clean_runtime: None) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    for hook_first in (True, False):
        model = Net()
        exact = model(X + 1) * 2
        if hook_first:
            add_hook_to_module(model, Plus())
        model = accelerator.prepare(model)
        if not hook_first:
            add_hook_to_module(model, Plus())
        assert not torch.equal(model(X), exact)
        torch.testing.assert_close(model(X), exact, rtol=0.05, atol=0.05)
        model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        assert torch.equal(model(X), exact), "the hook stays, the precision goes"
        remove_hook_from_module(model)
        torch.testing.assert_close(model(X), Net.forward(model, X), rtol=0, atol=0)
