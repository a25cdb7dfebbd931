"""The names that users import from `accelerate.utils.memory`; they are defined in other modules."""

from ..memory import (
    clear_device_cache,
    find_executable_batch_size,
    release_memory,
    should_reduce_batch_size,
)
from ..takeover.names import complete_names

__all__ = ["clear_device_cache", "find_executable_batch_size", "release_memory", "should_reduce_batch_size"]


complete_names(__name__)
