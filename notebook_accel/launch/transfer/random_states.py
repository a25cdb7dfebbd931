"""The random states of the kernel, for its workers.

Every rank starts with them, however it is started: a fresh process has its own, and Python gives a forked one
another state of `random`.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class RandomStates:
    """States of Python's, NumPy's (where it is imported) and torch's CPU generators; the seed of its devices."""

    python: Any
    numpy: Any
    torch: bytes
    seed: int

    @classmethod
    def capture(cls) -> RandomStates:
        """Read this process's states."""
        numpy = sys.modules.get("numpy")
        return cls(
            python=random.getstate(),
            numpy=numpy.random.get_state() if numpy is not None else None,
            torch=torch.get_rng_state().numpy().tobytes(),
            seed=torch.initial_seed(),
        )

    def restore(self, *, forked: bool) -> None:
        """Set this process's states. Generators of devices start with the seed that the kernel gave torch.

        A forked process has torch's and NumPy's already, and their locks as they were at the fork: another thread of
        the kernel may have held one.
        """
        random.setstate(self.python)
        if forked:
            return
        torch.manual_seed(self.seed)  # of devices too, when they start
        torch.set_rng_state(torch.frombuffer(bytearray(self.torch), dtype=torch.uint8))
        if self.numpy is not None:
            import numpy

            numpy.random.set_state(self.numpy)
