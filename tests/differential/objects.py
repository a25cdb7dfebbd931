"""Cases: prepared models as objects: what they return, copies, hooks, compiled ones, and the way back."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import io
import pickle
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.differential.parts import linear, sgd

X = torch.ones(2, 3)
Named = namedtuple("Named", ["a", "b"])


@dataclasses.dataclass
class Record:
    a: Any
    b: Any


class Held:
    def __init__(self, value: Any) -> None:
        self.value = value


SHAPES: dict[str, Callable[[torch.Tensor], Any]] = {
    "ordered": lambda out: OrderedDict(loss=out.sum(), more=[out, None]),
    "named": lambda out: Named(out, (out, "text")),
    "user dict": lambda out: dict(UserDict(a=out)),
    "default dict": lambda out: defaultdict(list, a=[out]),
    "dataclass": lambda out: Record(out, [out]),
    "double": lambda out: out.double(),
    "object": lambda out: Held(out),
}


class Shaped(nn.Module):
    def __init__(self, shape: str) -> None:
        super().__init__()
        self.layer, self.shape = linear(), shape

    def forward(self, x: torch.Tensor) -> Any:
        return SHAPES[self.shape](self.layer(x))

    def half_way(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out


def returned(library: Any, shape: str) -> Any:
    accelerator = library.Accelerator(cpu=True, mixed_precision="bf16")
    out = accelerator.prepare(Shaped(shape))(X)
    return (type(out).__name__, out.value) if isinstance(out, Held) else (type(out).__name__, out)


def other_methods(library: Any) -> Any:
    """Only the forward runs in the precision; any other method needs `autocast`."""
    accelerator = library.Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.unwrap_model(accelerator.prepare(Shaped("double")))
    with accelerator.autocast():
        within = model.half_way(X)
    return model.half_way(X), within


def copied(library: Any, how: str, mode: str, whole: bool) -> Any:
    """A copy computes with weights of its own."""
    accelerator = library.Accelerator(cpu=True, mixed_precision=mode)
    model = accelerator.prepare(linear())
    model = model if whole else accelerator.unwrap_model(model)
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.fill_(0.25)
    return type(twin).__name__, twin(X), model(X)


def hook(library: Any, place: str) -> Any:
    """A hook on a model before it is prepared, or on the unwrapped one after."""
    hooks = importlib.import_module(f"{library.__name__}.hooks")

    class Tenfold(hooks.ModelHook):  # type: ignore[misc,name-defined]
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return output * 10

    accelerator = library.Accelerator(cpu=True, mixed_precision="bf16")
    own = linear()
    if place == "before":
        hooks.add_hook_to_module(own, Tenfold())
    model = accelerator.prepare(own)
    if place == "after":
        hooks.add_hook_to_module(accelerator.unwrap_model(model), Tenfold())
    with_hook = model(X)
    bare = accelerator.unwrap_model(model, keep_fp32_wrapper=False) if place == "before" else own
    hooks.remove_hook_from_module(bare)
    return with_hook, bare(X)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x

    def extra(self) -> str:
        return "own"


def compiled(library: Any, mode: str, regional: bool, names: bool = False) -> Any:
    plugin = library.utils.TorchDynamoPlugin(backend="eager", use_regional_compilation=regional)
    accelerator = library.Accelerator(cpu=True, mixed_precision=mode, dynamo_plugin=plugin)
    own = Blocks()
    model, optimizer = accelerator.prepare(own, sgd(own))
    if names:
        return list(accelerator.get_state_dict(model))
    losses = []
    for _ in range(3):
        accelerator.backward(loss := model(X).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    plain = accelerator.unwrap_model(model, keep_torch_compile=False)
    return (
        losses,
        type(model).__name__,
        type(accelerator.unwrap_model(model)).__name__,
        accelerator.unwrap_model(model).extra(),
        plain is own,
        list(plain.state_dict()),
        library.utils.has_compiled_regions(model),
        library.utils.is_compiled_module(model),
    )


def compiled_by_user(library: Any) -> Any:
    accelerator = library.Accelerator(cpu=True, mixed_precision="bf16")
    own = linear()
    model = accelerator.prepare(torch.compile(own, backend="eager"))
    return type(model).__name__, model(X), accelerator.unwrap_model(model, keep_torch_compile=False) is own


def nothing_to_train(library: Any) -> Any:
    accelerator = library.Accelerator(cpu=True)
    return accelerator.prepare(linear().requires_grad_(False))(X)


def own_forward(library: Any) -> Any:
    """A forward set on the instance is there again once the precision is taken off."""
    accelerator = library.Accelerator(cpu=True, mixed_precision="bf16")
    own = linear()
    own.forward = lambda x: x.mm(x.T)  # type: ignore[method-assign]
    model = accelerator.prepare_model(own, evaluation_mode=True)
    return model(X), accelerator.unwrap_model(model, keep_fp32_wrapper=False)(X)


CASES: dict[str, Callable[[Any], Any]] = {
    **{f"returned {shape}": partial(returned, shape=shape) for shape in SHAPES},
    "other methods": other_methods,
    **{
        f"{how}, {mode}{', whole' if whole else ''}": partial(copied, how=how, mode=mode, whole=whole)
        for how in ("deepcopy", "pickle", "save")
        for mode in ("no", "bf16")
        for whole in (False, True)
    },
    "hook before": partial(hook, place="before"),
    "hook after": partial(hook, place="after"),
    **{
        f"compiled, {mode}{', regional' if regional else ''}": partial(compiled, mode=mode, regional=regional)
        for mode in ("no", "bf16")
        for regional in (False, True)
    },
    "compiled, names": partial(compiled, mode="no", regional=False, names=True),
    "compiled by the user": compiled_by_user,
    "nothing to train": nothing_to_train,
    "own forward": own_forward,
}
