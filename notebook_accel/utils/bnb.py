"""The names that users import from `accelerate.utils.bnb`; they are defined in other modules."""

from ..quantization import load_and_quantize_model
from ..takeover.names import complete_names
from .layers import get_parameter_device, has_4bit_bnb_layers

__all__ = ["get_parameter_device", "has_4bit_bnb_layers", "load_and_quantize_model"]

complete_names(__name__)
