"""What a model's tensors add up to in each dtype: to load it, to place it on devices, to train it with Adam."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn.parameter import is_lazy

from ..big_modeling.sizes import no_split_classes

BITS: Final = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int4": 4}
"""Dtypes that can be estimated, with the bits of a weight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A tensor of a model.

    Attributes:
        name: its first one, where it has several.
        count: elements.
        dtype: as it is stored.
        is_trained: False for buffers and for parameters that are frozen.
    """

    name: str
    count: int
    dtype: torch.dtype
    is_trained: bool

    def size(self, bits: int) -> int:
        """Return bytes with this many bits a value; tensors of whole numbers and truth values stay as they are."""
        if not self.dtype.is_floating_point:
            return self.count * self.dtype.itemsize
        return -(-self.count * bits // 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Tensors that go to one device together.

    Attributes:
        name: of the module, or of the tensor that is in no module with others.
        kind: the module's class, empty where it is not known.
        parts: with weights that another block has too.
    """

    name: str
    kind: str
    parts: tuple[Part, ...]

    def size(self, bits: int) -> int:
        """Return bytes with this many bits a value."""
        return sum(part.size(bits) for part in self.parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """The tensors of a model, tied ones once, and the blocks that cannot be split.

    Attributes:
        origin: where they were listed.
        notes: what could not be known.
    """

    origin: str
    parts: tuple[Part, ...]
    blocks: tuple[Block, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What a model needs in a dtype, in bytes.

    Attributes:
        largest_layer: of the largest block, which has to fit on one device whole.
        layer: that block's name.
        total: of all tensors, to load them.
        training: with Adam, see `training`; None where weights of the dtype are not trained.
    """

    dtype: str
    largest_layer: int
    layer: str
    total: int
    training: int | None


def need(inventory: Inventory, dtype: str) -> Need:
    """Return what the model needs in a dtype of `BITS`; ValueError for another."""
    if dtype not in BITS:
        raise ValueError(f"dtype {dtype!r} is unknown, choose from {', '.join(BITS)}")
    bits = BITS[dtype]
    largest = max(inventory.blocks, key=lambda block: block.size(bits), default=None)
    return Need(
        dtype=dtype,
        largest_layer=largest.size(bits) if largest else 0,
        layer=largest.name if largest else "",
        total=sum(part.size(bits) for part in inventory.parts),
        training=training(inventory.parts, dtype),
    )


def training(parts: Iterable[Part], dtype: str) -> int | None:
    """Return bytes of a training with Adam, without activations; None for dtypes whose weights are not trained.

    float32: weights, gradients and Adam's two moments (`torch.optim.Adam`: exp_avg, exp_avg_sq), 4 bytes each, are
    16 a trained weight. Frozen weights and buffers need their 4 only.

    float16 and bfloat16 mean `Accelerator(mixed_precision=...)`, which trains by autocast: all of the above stays at
    float32, gradients too since autograd gives them their parameter's dtype, and each weight has a copy at 16 bits
    from forward to backward: at most 18 bytes a trained weight, 6 a frozen one. ZeRO (arXiv:1910.02054, section 3.1)
    counts 16 for training with gradients at 16 bits: 2 + 2 for weights and gradients, 12 for Adam with its own copy
    of the weights.
    """
    if BITS[dtype] < 16:
        return None
    total = 0
    for part in parts:
        total += part.size(32) * (4 if part.is_trained else 1)
        if BITS[dtype] == 16 and part.dtype.is_floating_point:
            total += part.size(16)
    return total


def of_model(model: torch.nn.Module, origin: str, notes: Sequence[str] = ()) -> Inventory:
    """Return the tensors of a model on any device; ValueError if there are none or if one has no shape yet."""
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
    whole = no_split_classes(model)
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


def of_names(parts: Iterable[Part], origin: str, notes: Sequence[str] = ()) -> Inventory:
    """Return an inventory of tensors of which only names are known: those of one module are a block."""
    parts = tuple(parts)
    modules: dict[str, list[Part]] = {}
    for part in parts:
        modules.setdefault(part.name.rpartition(".")[0] or part.name, []).append(part)
    blocks = tuple(Block(name=name, kind="", parts=tuple(those)) for name, those in modules.items())
    return Inventory(origin=origin, parts=parts, blocks=blocks, notes=tuple(notes))
