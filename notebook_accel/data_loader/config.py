"""DataLoaderConfiguration: how the accelerator prepares data loaders."""

from __future__ import annotations

from dataclasses import dataclass

from ..probes import at_least, version


@dataclass(frozen=True)
class DataLoaderConfiguration:
    """How data loaders are shared out among the processes.

    Attributes:
        split_batches: True splits each batch of the loader over the processes, so that the batch size is the
            total one; False gives every process whole batches.
        dispatch_batches: True reads on rank 0 and sends every process its part; None does so for iterable
            datasets.
        even_batches: True repeats samples from the start so that all processes get equal batches.
        use_seedable_sampler: True shuffles by seed and epoch alone, see `SeedableRandomSampler`.
        data_seed: its seed; None takes that of torch's global generator.
        non_blocking: True copies from pinned memory while the computation goes on.
        use_stateful_dataloader: True gives loaders `state_dict` and `load_state_dict`, to go on in the middle of
            an epoch; needs torchdata.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False

    def __post_init__(self) -> None:
        if self.use_stateful_dataloader:
            require_torchdata()


def require_torchdata() -> None:
    """Raise ImportError unless there is a torchdata whose loaders have a state."""
    if not at_least("torchdata", "0.11"):
        found = version("torchdata")
        raise ImportError(
            f"use_stateful_dataloader=True needs torchdata 0.11 or later, and "
            f"{'there is none' if found is None else f'this is {found}'}: pip install 'notebook-accel[stateful]'"
        )
