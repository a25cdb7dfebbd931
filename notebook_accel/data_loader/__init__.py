"""Data loaders that give every process of a run its share."""

from ..handlers import DataLoaderConfiguration
from ..takeover.names import complete_names
from .base import PreparedLoader as DataLoaderAdapter
from .base import PreparedLoader as DataLoaderStateMixin
from .dispatch import DataLoaderDispatcher
from .iterable import IterableDatasetShard
from .prepare import prepare_data_loader
from .samplers import BatchSamplerShard, SeedableRandomSampler, SkipBatchSampler, get_sampler
from .shard import DataLoaderShard
from .skip import SkipDataLoader, skip_first_batches

__all__ = [
    "BatchSamplerShard",
    "DataLoaderAdapter",
    "DataLoaderConfiguration",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DataLoaderStateMixin",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "get_sampler",
    "prepare_data_loader",
    "skip_first_batches",
]


complete_names(__name__)
