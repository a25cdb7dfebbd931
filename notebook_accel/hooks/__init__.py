"""Hooks around a module's forward: they see and change its arguments, its output and where its weights are."""

from ..takeover.names import complete_names
from .align import AlignDevicesHook, align_module_device, has_offloaded_params
from .attach import (
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
)
from .base import (
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from .casting import LayerwiseCastingHook, attach_layerwise_casting_hooks
from .cpu import CpuOffload, UserCpuOffloadHook

__all__ = [
    "AlignDevicesHook",
    "CpuOffload",
    "LayerwiseCastingHook",
    "ModelHook",
    "SequentialHook",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "align_module_device",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "attach_layerwise_casting_hooks",
    "has_offloaded_params",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
]


complete_names(__name__)
