"""Inference with models that are larger than a device: parts on several devices, on the CPU and on the disk."""

from ..hooks import attach_layerwise_casting_hooks
from ..takeover.names import complete_names
from .device_map import infer_auto_device_map
from .dispatch import dispatch_model, load_checkpoint_and_dispatch
from .init import init_empty_weights, init_on_device
from .load import load_checkpoint_in_model
from .whole import cpu_offload, cpu_offload_with_hook, disk_offload

__all__ = [
    "attach_layerwise_casting_hooks",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
]


complete_names(__name__)
