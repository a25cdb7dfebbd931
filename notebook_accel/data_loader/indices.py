"""Random access to the indices that torch's samplers yield: a rank computes its own share and no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch.utils.data import RandomSampler

_BLOCK = 32
"""Indices that torch's RandomSampler draws at a time with replacement."""

_MAX_NARROW = 2**27
"""Below this the CPU's randperm gives the same numbers as int32, in less time and half the memory."""


class Indices(Protocol):
    """The indices of one epoch of a sampler, by position."""

    length: int

    def take(self, start: int, stop: int, reach: int) -> list[int]:
        """Return the indices at the positions from `start` up to `stop`.

        Args:
            start: first position.
            stop: the position after the last one.
            reach: indices are drawn up to this position, as torch does in its batches.
        """

    def finish(self) -> None:
        """Leave generator and sampler as an iteration to the end of the epoch would."""


class SequentialIndices:
    """The indices 0, 1, 2, ..."""

    def __init__(self, length: int) -> None:
        self.length = length

    def take(self, start: int, stop: int, reach: int) -> list[int]:
        return list(range(start, stop))

    def finish(self) -> None:
        return None


class RandomIndices:
    """The indices of a `RandomSampler`: same draws from the same generator in the same order as iterating it.

    They are drawn when first needed, one permutation of the data source at a time (blocks of 32 with
    replacement), so that an epoch that is left early leaves the generator where torch would.
    """

    def __init__(self, sampler: RandomSampler, on_end: Callable[[], None] | None = None) -> None:
        self.length = sampler.num_samples
        self._range = len(sampler.data_source)
        self._replacement = sampler.replacement
        self._shared = sampler.generator is not None
        self._generator = sampler.generator if self._shared else torch.Generator()
        if not self._shared:
            self._generator.manual_seed(draw_seed())
        self._on_end = on_end
        on_cpu = self._generator.device.type == "cpu"
        self._dtype = torch.int32 if on_cpu and self._range < _MAX_NARROW else torch.int64
        self._drawn = torch.empty(0, dtype=self._dtype, device="cpu")
        self._num_drawn = 0

    def take(self, start: int, stop: int, reach: int) -> list[int]:
        if self._num_drawn < reach:
            self._draw(reach)
        indices: list[int] = self._drawn[start:stop].tolist()
        return indices

    def finish(self) -> None:
        if self._shared:
            self._draw(self.length)
            if not self._replacement and self.length % self._range == 0:
                self._pass_permutation()
        if self._on_end is not None:
            self._on_end()

    def _draw(self, reach: int) -> None:
        if self._num_drawn == 0 and self.length == self._range and not self._replacement:
            self._drawn = self._permutation()
            self._num_drawn = self.length
            return
        if self._drawn.numel() == 0:
            self._drawn = torch.empty(self.length, dtype=self._dtype, device="cpu")
        while self._num_drawn < reach:
            left = self.length - self._num_drawn
            part = self._block(reach) if self._replacement else self._permutation()
            part = part[:left]
            self._drawn[self._num_drawn : self._num_drawn + len(part)] = part
            self._num_drawn += len(part)

    def _permutation(self) -> torch.Tensor:
        if self._dtype is torch.int32:
            return torch.randperm(self._range, generator=self._generator, dtype=torch.int32)
        return torch.randperm(self._range, generator=self._generator).cpu()

    def _pass_permutation(self) -> None:
        """Advance the generator by a permutation: torch draws a partial one at the end, even of no indices."""
        if self._dtype is torch.int32:
            torch.empty(self._range - 1, dtype=torch.uint8, device="cpu").random_(generator=self._generator)
        else:
            self._permutation()

    def _block(self, reach: int) -> torch.Tensor:
        missing = min(reach, self.length) - self._num_drawn
        left = self.length - self._num_drawn
        size = min(-(-missing // _BLOCK) * _BLOCK, left)
        return torch.randint(self._range, (size,), dtype=torch.int64, generator=self._generator).cpu()


def draw_seed(generator: torch.Generator | None = None) -> int:
    """Return a seed, drawn as torch's own samplers do.

    Args:
        generator: what it is drawn from; None for torch's global one.
    """
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
