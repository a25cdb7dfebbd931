"""DataLoaderConfiguration: how the accelerator prepares data loaders."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DataLoaderConfiguration:
    """How data loaders are shared out among the processes; ValueError for what is not supported.

    Attributes:
        split_batches: True splits each batch of the loader over the processes, so that the batch size is the
            total one; False gives every process whole batches.
        dispatch_batches: True reads on rank 0 and sends every process its part; None does so for iterable
            datasets.
        even_batches: True repeats samples from the start so that all processes get equal batches.
        use_seedable_sampler: True shuffles by seed and epoch alone, see `SeedableRandomSampler`.
        data_seed: its seed; None takes that of torch's global generator.
        non_blocking: True copies from pinned memory while the computation goes on.
        use_stateful_dataloader: must be False; loaders of torchdata are not supported.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False

    def __post_init__(self) -> None:
        require_stateless(self.use_stateful_dataloader)


def require_stateless(use_stateful_dataloader: bool) -> None:
    """Raise ValueError if a loader of torchdata is asked for."""
    if use_stateful_dataloader:
        raise ValueError(
            "use_stateful_dataloader=True is not supported: use False, and skip_first_batches to go on in the "
            "middle of an epoch"
        )
