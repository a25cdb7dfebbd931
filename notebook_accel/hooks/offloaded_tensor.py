"""The stand-in for an offloaded weight: a tensor without values that raises an error where it is computed with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .. import nested


class OffloadedTensor(torch.Tensor):
    """A tensor on the meta device that raises RuntimeError in operations with tensors that have values.

    Torch itself raises nothing: on the CPU it returns uninitialised memory for products with a weight on the meta
    device. Views of an offloaded tensor, and results of operations on such tensors alone, are offloaded tensors too.
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
                shape = next(
                    (list(tensor.shape) for tensor in given if isinstance(tensor, OffloadedTensor)), "unknown"
                )
                raise RuntimeError(
                    f"{getattr(func, '__name__', func)}() was given a weight of shape {shape} that is offloaded, on "
                    "the meta device: it is brought back for the forward of its own module; where another module or a "
                    "pre-hook uses it, name the class of a module around both in preload_module_classes"
                )
            return nested.recursively_apply(_as_offloaded, func(*args, **kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self), make_offloaded(self))  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, (tuple(self.shape), self.dtype, self.requires_grad, vars(self))


def _rebuild(
    shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, attributes: dict[str, Any]
) -> torch.Tensor:
    made = (
        torch.empty(shape, dtype=dtype, device="meta")
        .as_subclass(OffloadedTensor)
        .requires_grad_(requires_grad)
    )
    vars(made).update(attributes)
    return made


def _as_offloaded(tensor: torch.Tensor) -> torch.Tensor:
    return (
        tensor.as_subclass(OffloadedTensor)
        if tensor.is_meta and not isinstance(tensor, OffloadedTensor)
        else tensor
    )


def make_offloaded(tensor: torch.Tensor) -> torch.Tensor:
    """Return the stand-in for a weight while it is offloaded.

    Args:
        tensor: a parameter or buffer.

    Returns:
        A tensor of the same shape and dtype on the meta device; a parameter for a parameter. Classes of libraries are
        kept, and raise nothing.
    """
    if type(tensor) not in (torch.Tensor, nn.Parameter, OffloadedTensor):
        return tensor if tensor.is_meta else like_parameter(tensor, tensor.detach().to("meta"))
    made = tensor.detach().to("meta").as_subclass(OffloadedTensor)
    if not isinstance(tensor, nn.Parameter):
        return made
    parameter = nn.Parameter(made, requires_grad=tensor.requires_grad)
    vars(parameter).update(vars(tensor))
    return parameter


def read_dtype_and_grad(tensor: torch.Tensor) -> tuple[torch.dtype, bool]:
    """Return `dtype` and `requires_grad`, which users may change while a weight is offloaded, without our checks."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.dtype, tensor.requires_grad


def like_parameter(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a value as the kind of tensor that it replaces.

    Args:
        old: what it replaces: a buffer, a parameter, or the stand-in for one.
        value: the new values.

    Returns:
        The value itself for a buffer; for a parameter one of its class, with its attributes and `requires_grad`.
    """
    if not isinstance(old, nn.Parameter) or value is old:
        return value
    kind = nn.Parameter if isinstance(old, OffloadedTensor) else type(old)
    _, requires_grad = read_dtype_and_grad(old)
    if isinstance(value, kind) and value.requires_grad == requires_grad:
        return value
    more = vars(old) if kind is not nn.Parameter else {}
    made: torch.Tensor = kind(value.detach(), requires_grad=requires_grad, **more)
    if kind is nn.Parameter:
        vars(made).update({name: item for name, item in vars(old).items() if name != "_is_param"})
    return made
