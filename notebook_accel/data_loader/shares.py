"""Which share of the samples a process gets, where some processes get the same ones."""

from __future__ import annotations

from typing import Any, Final

_SAME_SAMPLES: Final = ("tp", "cp")
_OWN_SAMPLES: Final = ("dp_replicate", "dp_shard", "dp", "fsdp")


def share_of(num_processes: int, process_index: int, mesh: Any = None) -> tuple[int, int]:
    """Return how many shares there are and which one is this process's.

    Processes that differ only in the `tp` and `cp` dimensions of the mesh share one; those dimensions are the last.

    Raises:
        ValueError: the process is not among those that shares are for.
    """
    if mesh is not None:
        sizes = {name: int(mesh[name].size()) for name in mesh.mesh_dim_names or ()}
        for name in _SAME_SAMPLES:
            process_index //= sizes.get(name, 1)
        num_processes = 1
        for name in _OWN_SAMPLES:
            num_processes *= sizes.get(name, 1)
    if not 0 <= process_index < num_processes:
        raise ValueError(
            f"process_index {process_index} is not among the {num_processes} processes 0..{num_processes - 1}"
        )
    return num_processes, process_index
