"""How messages name a rank."""

from __future__ import annotations


def name_process(rank: int, pid: int, node: str = "") -> str:
    """Return a rank with its process, as `rank 1 (process 7)` or `rank 1 (on gpu2, process 7)`.

    Args:
        rank: the rank.
        pid: its process id there.
        node: its host or node; empty where that needs no word.
    """
    return f"rank {rank} ({f'on {node}, ' if node else ''}process {pid})"
