"""Data loaders that give every process of a run its share."""

from ..handlers import DataLoaderConfiguration
from .dispatch import DataLoaderDispatcher
from .iterable import IterableDatasetShard
from .prepare import prepare_data_loader
from .samplers import BatchSamplerShard, SeedableRandomSampler, SkipBatchSampler
from .shard import DataLoaderShard
from .skip import SkipDataLoader, skip_first_batches

__all__ = [
    "BatchSamplerShard",
    "DataLoaderConfiguration",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "prepare_data_loader",
    "skip_first_batches",
]
