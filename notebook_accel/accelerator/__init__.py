"""Accelerator: one object that makes a training loop run on any number of processes."""

from .core import Accelerator

__all__ = ["Accelerator"]
