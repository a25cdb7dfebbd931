"""Distributed PyTorch from a notebook cell."""
