"""A line to fit: the data and the model of small tests."""

from __future__ import annotations

from typing import Any

import torch


class RegressionDataset:
    """Points near a line.

    Args:
        a: slope.
        b: height at 0.
        length: number of points.
        seed: of the points; None for others each time.
    """

    def __init__(self, a: float = 2, b: float = 3, length: int = 64, seed: int | None = None) -> None:
        import numpy

        source = numpy.random.default_rng(seed)
        self.length = length
        self.x = source.normal(size=(length,)).astype(numpy.float32)
        noise = source.normal(scale=0.1, size=(length,)).astype(numpy.float32)
        self.y = a * self.x + b + noise

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: Any) -> dict[str, Any]:
        return {"x": self.x[i], "y": self.y[i]}


class RegressionModel(torch.nn.Module):
    """A line with two parameters.

    Args:
        a: slope.
        b: height at 0.
        double_output: has no effect, also in Accelerate.
    """

    def __init__(self, a: float = 0, b: float = 0, double_output: bool = False) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.tensor(float(a)))
        self.b = torch.nn.Parameter(torch.tensor(float(b)))
        self.first_batch = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the heights at some places.

        Args:
            x: the places.
        """
        self.first_batch = False
        return x * self.a + self.b
