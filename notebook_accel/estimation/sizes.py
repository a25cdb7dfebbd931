"""Adds up a model's tensors in each dtype: memory to load it, to place it on devices, to train it with Adam."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn.parameter import is_lazy

from ..big_modeling.sizes import find_whole_classes

BITS: Final = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int4": 4}
"""Dtypes that can be estimated, with the bits of a weight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A tensor of a model.

    Attributes:
        name: its first name, where it has several.
        count: number of elements.
        dtype: as it is stored.
        is_trained: False for buffers and for frozen parameters.
    """

    name: str
    count: int
    dtype: torch.dtype
    is_trained: bool

    def size(self, bits: int) -> int:
        """Return the bytes of the tensor.

        Args:
            bits: of a floating point value. Tensors of integers and of bools keep their own size.
        """
        if not self.dtype.is_floating_point:
            return self.count * self.dtype.itemsize
        return -(-self.count * bits // 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Tensors that go to one device together.

    Attributes:
        name: of the module, or of a tensor that belongs to no module of several.
        kind: the module's class, empty where it is not known.
        parts: its tensors; a weight that two blocks share is in both.
    """

    name: str
    kind: str
    parts: tuple[Part, ...]

    def size(self, bits: int) -> int:
        """Return the bytes of its tensors.

        Args:
            bits: of a floating point value, as in `Part.size`.
        """
        return sum(part.size(bits) for part in self.parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """The tensors of a model, and the blocks that cannot be split.

    Attributes:
        origin: what the tensors were listed from.
        parts: all tensors, shared ones once.
        blocks: the same tensors by block.
        notes: sentences on what could not be known.
    """

    origin: str
    parts: tuple[Part, ...]
    blocks: tuple[Block, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What a model needs in a dtype, in bytes.

    Attributes:
        dtype: one of `BITS`.
        largest_layer: of the largest block, which has to fit on one device.
        layer: that block's name.
        total: of all tensors, to load them.
        training: with Adam, see `estimate_training`; None where weights of the dtype are not trained.
    """

    dtype: str
    largest_layer: int
    layer: str
    total: int
    training: int | None


def estimate(inventory: Inventory, dtype: str) -> Need:
    """Return what a model needs in a dtype.

    Args:
        inventory: its tensors.
        dtype: one of `BITS`.

    Raises:
        ValueError: the dtype is none of these.
    """
    if dtype not in BITS:
        raise ValueError(f"dtype {dtype!r} is unknown, choose from {', '.join(BITS)}")
    bits = BITS[dtype]
    largest = max(inventory.blocks, key=lambda block: block.size(bits), default=None)
    return Need(
        dtype=dtype,
        largest_layer=largest.size(bits) if largest else 0,
        layer=largest.name if largest else "",
        total=sum(part.size(bits) for part in inventory.parts),
        training=estimate_training(inventory.parts, dtype),
    )


def estimate_training(parts: Iterable[Part], dtype: str) -> int | None:
    """Return the bytes that a training with Adam needs, without activations.

    float32: weights, gradients and Adam's two moments (`torch.optim.Adam`: exp_avg, exp_avg_sq) have 4 bytes each:
    16 for a trained weight. Frozen weights and buffers need their own 4.

    float16 and bfloat16 mean `Accelerator(mixed_precision=...)`, which trains by autocast. All of the above stays at
    float32; gradients do too, because autograd gives them the dtype of their parameter. Each weight also has a copy at
    16 bits from forward to backward: at most 18 bytes for a trained weight, 6 for a frozen one. ZeRO (arXiv:1910.02054,
    section 3.1) counts 16 for training with gradients at 16 bits: 2 + 2 for weights and gradients, 12 for Adam with its
    own copy of the weights.

    Args:
        parts: the model's tensors.
        dtype: one of `BITS`.

    Returns:
        Bytes, or None for dtypes whose weights are not trained.
    """
    if BITS[dtype] < 16:
        return None
    total = 0
    for part in parts:
        total += part.size(32) * (4 if part.is_trained else 1)
        if BITS[dtype] == 16 and part.dtype.is_floating_point:
            total += part.size(16)
    return total


def list_tensors(model: torch.nn.Module, origin: str, notes: Sequence[str] = ()) -> Inventory:
    """Return the tensors of a model.

    Args:
        model: on any device, the meta device too.
        origin: its name in errors and in the inventory.
        notes: for the inventory.

    Raises:
        ValueError: it has no tensors, or one of them has no shape before the first batch.
    """
    trained = {id(tensor): tensor.requires_grad for tensor in model.parameters()}

    def part(name: str, tensor: torch.Tensor) -> Part:
        if is_lazy(tensor):
            raise ValueError(f"{origin}: {name!r} is lazy and has a shape after the first batch only")
        return Part(
            name=name,
            count=tensor.numel(),
            dtype=tensor.dtype,
            is_trained=trained.get(id(tensor), False),
        )

    parts = [part(name, tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]]
    if not parts:
        raise ValueError(f"{origin} has no parameters and no buffers")
    whole = find_whole_classes(model)
    blocks: list[Block] = []

    def walk(name: str, module: torch.nn.Module) -> None:
        kind = type(module).__name__
        children = list(module.named_children())
        is_whole = not children or kind in whole
        own = [
            (f"{name}.{key}" if name else key, tensor)
            for tensors in (module.named_parameters, module.named_buffers)
            for key, tensor in tensors(recurse=is_whole)
        ]
        if is_whole:
            blocks.append(Block(name=name or kind, kind=kind, parts=tuple(part(*item) for item in own)))
            return
        blocks.extend(Block(name=key, kind="", parts=(part(key, tensor),)) for key, tensor in own)
        for key, child in children:
            walk(f"{name}.{key}" if name else key, child)

    walk("", model)
    return Inventory(origin=origin, parts=tuple(parts), blocks=tuple(blocks), notes=tuple(notes))


def list_named_tensors(parts: Iterable[Part], origin: str, notes: Sequence[str] = ()) -> Inventory:
    """Return an inventory of tensors of which only names and shapes are known: those of one module are a block.

    Args:
        parts: the tensors.
        origin: what they were listed from.
        notes: for the inventory.
    """
    parts = tuple(parts)
    modules: dict[str, list[Part]] = {}
    for part in parts:
        modules.setdefault(part.name.rpartition(".")[0] or part.name, []).append(part)
    blocks = tuple(Block(name=name, kind="", parts=tuple(those)) for name, those in modules.items())
    return Inventory(origin=origin, parts=parts, blocks=blocks, notes=tuple(notes))
