"""The names that users import from `accelerate.utils.offload`; they are defined in other modules."""

from ..big_modeling.offload import (
    OffloadedWeightsLoader,
    extract_submodules_state_dict,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)
from ..hooks.weights import PrefixedDataset
from ..takeover.names import complete_names

__all__ = [
    "OffloadedWeightsLoader",
    "PrefixedDataset",
    "extract_submodules_state_dict",
    "load_offloaded_weight",
    "offload_state_dict",
    "offload_weight",
    "save_offload_index",
]


complete_names(__name__)
