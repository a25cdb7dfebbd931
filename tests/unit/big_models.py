"""A small model that is spread over devices, and its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from notebook_accel.checkpointing import shards

INPUT = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, 4 * width)
        self.second = nn.Linear(4 * width, width)
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.relu(self.first(x))) * self.scale


class Words(nn.Module):
    """Blocks between an embedding and a head that share their weights."""

    def __init__(self, width: int = 16, blocks: int = 6) -> None:
        super().__init__()
        self.words = nn.Embedding(50, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("steps", torch.arange(5)[:, None], persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.words(x) + self.steps
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def words(seed: int = 0, **options: Any) -> Words:
    torch.manual_seed(seed)
    return Words(**options).eval()


def half(blocks: int = 6) -> dict[str, Any]:
    """Return a map with the second half of the blocks on the disk."""
    return {"words": "cpu", "head": "cpu"} | {
        f"blocks.{number}": "cpu" if number < blocks // 2 else "disk" for number in range(blocks)
    }


def save(model: nn.Module, folder: Path, kind: str = "safetensors") -> Path:
    """Save a checkpoint of one of the forms and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "plain safetensors":  # as others write them, where values begin at any multiple of 8
        state = dict(model.state_dict())
        state.pop("head.weight", None)
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        return folder / "model.safetensors"
    size = "5KB" if "sharded" in kind else "10GB"
    shards.save_weights(model.state_dict(), folder, size, safe_serialization="bin" not in kind)
    return folder


def kinds_of(model: nn.Module) -> dict[str, str]:
    """Return the kind of device of each weight."""
    return {name: tensor.device.type for name, tensor in model.state_dict().items()}
