"""How many samples the runs of an epoch have read, whatever their numbers of processes."""

from __future__ import annotations

from typing import Any, Final

from ..combinations import refuse

RECEIVES: Final = "_receives"
ALONE: Final = "_num_yielded"
WORKERS: Final = "_snapshot"

Rounds = list[tuple[int | None, int | str]]
"""For each run of an epoch how many batches it read, None for the last run, and its `PreparedLoader.round_size`. So the
samples before a batch are known, whatever the number of processes was."""


def first_rounds(rounds: Rounds, num_batches: int) -> Rounds:
    """Return the runs that read the first batches of an epoch, with the number that each read of these."""
    first: Rounds = []
    for number, size in rounds:
        read = num_batches if number is None else min(number, num_batches)
        num_batches -= read
        if read > 0:
            first.append((read, size))
    return first


def count_samples(rounds: Rounds, round_size: int | str) -> int:
    """Return the samples that runs have read, for a loader with this `round_size`."""
    samples = 0
    for number, size in rounds:
        if isinstance(size, str) or isinstance(round_size, str):
            readers = f"by {_describe(size)}, and this run has {_describe(round_size)}"
            raise refuse("own shards, other processes", readers)
        samples += (number or 0) * size
    return samples


def _describe(round_size: int | str) -> str:
    return (
        round_size if isinstance(round_size, str) else f"processes that read {round_size} samples at a time"
    )


def check_readers(state: dict[str, Any], num_workers: int) -> None:
    """Raise ValueError unless a state of a stateful loader is one of as many loader processes.

    Args:
        state: of torchdata's loader.
        num_workers: loader processes of this one.
    """
    if state.get(RECEIVES):
        raise ValueError(
            "the state is of a process that only receives batches: rank 0 needs the state of rank 0"
        )
    wanted = WORKERS if num_workers else ALONE
    if wanted not in state:
        raise ValueError(
            f"the state is not of a loader with num_workers={num_workers}: it has {sorted(state)}, not {wanted!r}; "
            "go on with as many worker processes as before"
        )
    if num_workers and len(state[WORKERS]["_worker_snapshots"]) != num_workers:
        raise ValueError(
            f"the state is of a loader with num_workers={len(state[WORKERS]['_worker_snapshots'])}, this one has "
            f"{num_workers}: go on with as many worker processes as before"
        )
