"""Accelerator: one object that makes a training loop run on any number of processes."""

from ..takeover.names import complete_names
from .core import Accelerator

__all__ = ["Accelerator"]


complete_names(__name__)
