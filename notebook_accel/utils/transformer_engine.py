"""The names that users import from `accelerate.utils.transformer_engine`; they are defined in other modules."""

from ..takeover.names import complete_names
from .modules import has_transformer_engine_layers
from .vendor import apply_fp8_autowrap, contextual_fp8_autocast, convert_model

__all__ = [
    "apply_fp8_autowrap",
    "contextual_fp8_autocast",
    "convert_model",
    "has_transformer_engine_layers",
]

complete_names(__name__)
