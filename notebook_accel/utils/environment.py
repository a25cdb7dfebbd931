"""The names that users import from `accelerate.utils.environment`; they are defined in other modules."""

from ..affinity import override_numa_affinity, set_numa_affinity
from ..environ import clear_environment, patch_environment, purge_accelerate_environment

__all__ = [
    "clear_environment",
    "override_numa_affinity",
    "patch_environment",
    "purge_accelerate_environment",
    "set_numa_affinity",
]
