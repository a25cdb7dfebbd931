"""What is in a weight's place while it is away: a tensor without values that says so where it is computed with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .. import nested


class Away(torch.Tensor):
    """A tensor on the meta device that raises RuntimeError where others that have values meet it.

    Torch itself returns memory as it finds it, on the CPU, for products of a weight on the meta device. Views of this
    one, and what is computed of it alone, are such tensors too.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            given = [leaf for leaf in nested.leaves_of([args, kwargs]) if isinstance(leaf, torch.Tensor)]
            if not all(tensor.is_meta for tensor in given):
                shape = next((list(tensor.shape) for tensor in given if isinstance(tensor, Away)), "unknown")
                raise RuntimeError(
                    f"{getattr(func, '__name__', func)}() was given a weight of shape {shape} that is away, on the "
                    "meta device: it comes for the forward of its own module; where another module or a pre-hook "
                    "uses it, name the class of a module around both in preload_module_classes"
                )
            return nested.recursively_apply(_as_away, func(*args, **kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self), emptied(self))  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _made_again, (tuple(self.shape), self.dtype, self.requires_grad, vars(self))


def _made_again(
    shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, attributes: dict[str, Any]
) -> torch.Tensor:
    made = torch.empty(shape, dtype=dtype, device="meta").as_subclass(Away).requires_grad_(requires_grad)
    vars(made).update(attributes)
    return made


def _as_away(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(Away) if tensor.is_meta and not isinstance(tensor, Away) else tensor


def emptied(tensor: torch.Tensor) -> torch.Tensor:
    """Return what is in a weight's place while it is away, of its shape and dtype; other classes are kept."""
    if type(tensor) not in (torch.Tensor, nn.Parameter, Away):
        return tensor if tensor.is_meta else like_parameter(tensor, tensor.detach().to("meta"))
    made = tensor.detach().to("meta").as_subclass(Away)
    if not isinstance(tensor, nn.Parameter):
        return made
    parameter = nn.Parameter(made, requires_grad=tensor.requires_grad)
    vars(parameter).update(vars(tensor))
    return parameter


def kept_by(tensor: torch.Tensor) -> tuple[torch.dtype, bool]:
    """Return the dtype and whether gradients are wanted, which users change while a weight is away; quick for each."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.dtype, tensor.requires_grad


def like_parameter(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the value as what the old one is: a buffer's, or a parameter of its class with its attributes."""
    if not isinstance(old, nn.Parameter) or value is old:
        return value
    kind = nn.Parameter if isinstance(old, Away) else type(old)
    _, requires_grad = kept_by(old)
    if isinstance(value, kind) and value.requires_grad == requires_grad:
        return value
    more = vars(old) if kind is not nn.Parameter else {}
    made: torch.Tensor = kind(value.detach(), requires_grad=requires_grad, **more)
    if kind is nn.Parameter:
        vars(made).update({name: item for name, item in vars(old).items() if name != "_is_param"})
    return made
