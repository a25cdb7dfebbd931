"""Compares all ranks' inputs before each collective, when ACCELERATE_DEBUG_MODE is set."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import CollectiveError
from ..nested import Flat
from .base import Comm

ROOT = "batch"
_MAX_LINES = 8


def compare_inputs(comm: Comm, operation: str, flat: Flat, *, free_dim: int | None = None) -> None:
    """Check that all ranks call the same operation with the same structure, shapes and dtypes.

    It costs one gather of an object.

    Args:
        comm: the collectives.
        operation: name of the function that the user called.
        flat: its input.
        free_dim: a dimension in which lengths may differ.

    Raises:
        CollectiveError: on every rank, if they differ; the message names paths and ranks.
    """
    own = (operation, _describe(flat, free_dim))
    everyone: list[tuple[str, list[tuple[str, str]]]] = comm.all_gather_object(own)
    if all(other == own for other in everyone):
        return
    operations = [name for name, _ in everyone]
    if len(set(operations)) > 1:
        raise CollectiveError(f"ranks are in different collectives: {_by_rank(operations, 'calls')}")
    lines = _disagreements([dict(leaves) for _, leaves in everyone])
    if not lines:
        lines = [f"{ROOT}: the leaves come in a different order on different ranks"]
    more = len(lines) - _MAX_LINES
    if more > 0:
        lines = [*lines[:_MAX_LINES], f"and {more} more"]
    raise CollectiveError(f"ranks disagree about the input of {operation}:\n  " + "\n  ".join(lines))


def _describe(flat: Flat, free_dim: int | None) -> list[tuple[str, str]]:
    paths = flat.paths(ROOT)
    return [(path, _describe_leaf(leaf, free_dim)) for path, leaf in zip(paths, flat.leaves, strict=True)]


def _describe_leaf(leaf: Any, free_dim: int | None) -> str:
    if not isinstance(leaf, torch.Tensor):
        return f"a {type(leaf).__name__}"
    shape: list[int | str] = list(leaf.shape) if not leaf.is_nested else ["nested"]
    if free_dim is not None and -len(shape) <= free_dim < len(shape):
        shape[free_dim] = "*"
    return f"[{', '.join(map(str, shape))}] {str(leaf.dtype).removeprefix('torch.')}"


def _disagreements(leaves: list[dict[str, str]]) -> list[str]:
    """Return a line for each path whose leaf is not the same on all ranks, in the order of first appearance."""
    paths = dict.fromkeys(path for of_rank in leaves for path in of_rank)
    lines = []
    for path in paths:
        found = [of_rank.get(path, "nothing") for of_rank in leaves]
        if len(set(found)) > 1:
            lines.append(f"{path}: {_by_rank(found, 'has')}")
    return lines


def _by_rank(values: list[str], verb: str) -> str:
    """Return `rank 0 has a, ranks 1-3 have b` for the values of ranks 0, 1, ..."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    plural = {"has": "have", "calls": "call"}[verb]
    return ", ".join(
        f"rank {owners[0]} {verb} {value}" if len(owners) == 1 else f"ranks {_spans(owners)} {plural} {value}"
        for value, owners in ranks.items()
    )


def _spans(ranks: list[int]) -> str:
    """Return `0-2, 5` for sorted ranks 0, 1, 2, 5."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
