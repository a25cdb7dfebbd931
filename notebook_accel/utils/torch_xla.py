"""The names that users import from `accelerate.utils.torch_xla`; they are defined in other modules."""

from ..takeover.names import complete_names
from .vendor import install_xla

__all__ = ["install_xla"]

complete_names(__name__)
