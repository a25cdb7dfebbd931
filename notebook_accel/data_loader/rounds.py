"""How many samples the runs of an epoch have read, whatever their numbers of processes."""

from __future__ import annotations

from ..combinations import refuse

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
