"""Distributed PyTorch from a notebook cell."""

from .launchers import debug_launcher, notebook_launcher

__all__ = ["debug_launcher", "notebook_launcher"]
