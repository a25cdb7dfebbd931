"""A small GPT over bytes and the text it learns: the standard library's own source, which is always there."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

LENGTH = 24


class Block(torch.nn.Module):
    """Attention to what came before, and two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.mix, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, length, width = x.shape
        heads = self.mix(self.before(x)).view(size, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(size, length, width))
        return x + self.down(torch.nn.functional.gelu(self.up(self.between(x))))


class SmallGPT(torch.nn.Module):
    """Two blocks; the last layer shares its weights with the first."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.letters, self.places = torch.nn.Embedding(256, width), torch.nn.Embedding(LENGTH, width)
        self.blocks = torch.nn.Sequential(Block(width), Block(width))
        self.last, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, 256, bias=False)
        for table in (self.letters, self.places):
            torch.nn.init.normal_(table.weight, std=0.02)
        self.head.weight = self.letters.weight

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting each letter but the first."""
        seen, wanted = letters[:, :-1], letters[:, 1:]
        x = self.letters(seen) + self.places.weight[: seen.shape[1]]
        logits = self.head(self.last(self.blocks(x)))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())


class Source(torch.utils.data.Dataset[torch.Tensor]):
    """Pieces of a module of the standard library."""

    def __init__(self, pieces: int, module: str = "argparse.py") -> None:
        text = Path(sysconfig.get_path("stdlib"), module).read_bytes()
        letters = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.pieces = letters[: pieces * LENGTH].view(pieces, LENGTH)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.pieces[index]
