"""The names that users import from `accelerate.parallelism_config`; they are defined in other modules."""

from .parallelism import ParallelismConfig
from .takeover.names import complete_names

__all__ = ["ParallelismConfig"]

complete_names(__name__)
