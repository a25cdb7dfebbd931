"""A small GPT and text to train it on: the Python standard library's own source, which is always there."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY = 128
LENGTH = 32


class Block(nn.Module):
    """Attention and a feed-forward part."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.queries, self.keys, self.values = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm(hidden)
        size = normed.shape[-1] // self.heads
        parts = (layer(normed).unflatten(-1, (-1, size)) for layer in (self.queries, self.keys, self.values))
        mixed = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in parts), is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(F.gelu(self.up(self.norm2(hidden))))


class GPT(nn.Module):
    """Predicts the next character; the head shares its weight with the embedding if `tied`."""

    _no_split_modules = ("Block",)
    tp_plan: ClassVar[dict[str, str]] = {
        "blocks.*.queries": "colwise",
        "blocks.*.keys": "colwise",
        "blocks.*.values": "colwise",
        "blocks.*.out": "rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
    }

    def __init__(self, width: int = 32, layers: int = 2, heads: int = 4, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden)) * self.scale
        return logits


@functools.cache
def text() -> torch.Tensor:
    """Return 200,000 characters of source code as numbers."""
    import argparse
    import typing

    source = "".join(Path(str(module.__file__)).read_text(encoding="utf-8") for module in (argparse, typing))
    return torch.tensor([min(ord(char), VOCABULARY - 1) for char in source[:200_000]])


def loader(batch_size: int, num_batches: int) -> DataLoader[Any]:
    """Return batches of sequences and their next characters, in order."""
    pieces = text().unfold(0, LENGTH + 1, 61)[: batch_size * num_batches]
    return DataLoader(TensorDataset(pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()), batch_size)


def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
