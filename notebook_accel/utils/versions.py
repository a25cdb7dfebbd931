"""The names that users import from `accelerate.utils.versions`; they are defined in other modules."""

from ..takeover.names import complete_names
from .availability import compare_versions, is_torch_version

__all__ = ["compare_versions", "is_torch_version"]

complete_names(__name__)
