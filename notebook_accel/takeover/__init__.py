"""Takes the place of Accelerate: what imports `accelerate` gets the names of this package."""

from .finder import take_over_accelerate

__all__ = ["take_over_accelerate"]
