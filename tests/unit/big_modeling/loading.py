"""A program that loads half of a checkpoint into memory and leaves half on the disk; prints its peaks as JSON.

python -m tests.unit.big_modeling.loading FILE LAYERS WIDTH
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from notebook_accel import init_empty_weights, load_checkpoint_and_dispatch
from tests.unit.big_modeling.measured import peak_above, reset_peak


def build(layers: int, width: int) -> torch.nn.Module:
    return torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(layers)])


def main(file: str, layers: int, width: int) -> dict[str, Any]:
    with init_empty_weights():
        model = build(layers, width)
        small = build(2, 4)
    small.to_empty(device="cpu")(torch.ones(1, 4))  # what a first product takes is not counted
    batch = torch.full((1, width), 0.01)
    found = {}
    before = reset_peak()
    places = {str(number): "cpu" if number < layers // 2 else "disk" for number in range(layers)}
    model = load_checkpoint_and_dispatch(model, file, places)
    found["load"] = peak_above(before)
    before = reset_peak()
    with torch.no_grad():
        for _ in range(2):
            output = model(batch)
    found["forward"] = peak_above(before)
    return {**found, "sum": float(output.double().sum())}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
