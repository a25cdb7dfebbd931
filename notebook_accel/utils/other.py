"""Small functions of `accelerate.utils.other` and its neighbours that nothing in this package needs itself."""

from __future__ import annotations

import functools
import socket
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from .. import environ
from ..choices import CustomDtype as CustomDtype
from ..nested import send_to_device
from ..takeover.names import complete_names
from .modeling import id_tensor_storage

if TYPE_CHECKING:  # each is imported when it is asked for, by `complete_names`
    from ..checkpointing.plain import load as load
    from ..checkpointing.plain import save as save
    from ..compilation import compile_regions as compile_regions
    from ..compilation import has_compiled_regions as has_compiled_regions
    from ..compilation import is_compiled_module as is_compiled_module
    from ..strategies import base as strategy
    from .modules import get_module_children_bottom_up as get_module_children_bottom_up
    from .operations import wait_for_everyone as wait_for_everyone

    extract_model_from_parallel = strategy.unwrap

_USUAL_PORT: Final = 29500


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the class of this name that a module or one inside it has, None where none has.

    Args:
        module: a model.
        name: of the class, without its module.
    """
    return next((type(part) for part in module.modules() if type(part).__name__ == name), None)


def is_repeated_blocks(module: nn.Module) -> bool:
    """Return True for a `ModuleList` of modules that are all of the first one's class.

    Args:
        module: any module.
    """
    return (
        isinstance(module, nn.ModuleList)
        and len(module) > 0
        and all(isinstance(part, type(module[0])) for part in module)
    )


def has_repeated_blocks(module: nn.Module) -> bool:
    """Return True if a module has a list of modules of one class in it.

    Args:
        module: any module.
    """
    return any(map(is_repeated_blocks, module.modules()))


def model_has_dtensor(model: nn.Module) -> bool:
    """Return True if a parameter is a DTensor.

    Args:
        model: any model.
    """
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def get_model_tp_size(model: nn.Module) -> int | None:
    """Return over how many processes Transformers has spread each layer of a model, None where it has not.

    Args:
        model: of Transformers.
    """
    if (size := getattr(model, "tp_size", None)) is not None:
        return int(size)
    spread = getattr(getattr(model, "config", None), "distributed_config", None)
    found = spread.get("tp_size") if isinstance(spread, dict) else getattr(spread, "tp_size", None)
    return None if found is None else int(found)


def clean_state_dict_for_safetensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return weights of which each memory has one name, the first, and is contiguous.

    Args:
        state_dict: tensors by name; others than tensors stay.
    """
    first: dict[Any, str] = {}
    for name, value in state_dict.items():
        if isinstance(value, torch.Tensor):
            first.setdefault(id_tensor_storage(value), name)
    kept = set(first.values())
    return {
        name: value.contiguous() if isinstance(value, torch.Tensor) else value
        for name, value in state_dict.items()
        if name in kept or not isinstance(value, torch.Tensor)
    }


def get_pretty_name(obj: Any) -> str:
    """Return the name of a function or class; for other objects that of their class.

    Args:
        obj: any object.
    """
    if not hasattr(obj, "__qualname__") and not hasattr(obj, "__name__"):
        obj = type(obj)
    return str(getattr(obj, "__qualname__", None) or obj.__name__)


def merge_dicts(source: Mapping[str, Any], destination: dict[str, Any]) -> dict[str, Any]:
    """Write the values of a dict into another one, and those of the dicts in it into the ones there.

    Args:
        source: the values.
        destination: is changed.

    Returns:
        The destination.
    """
    for key, value in source.items():
        if isinstance(value, dict):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def is_port_in_use(port: int | None = None) -> bool:
    """Return True if a program of this machine listens at a port.

    Args:
        port: by default 29500.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", _USUAL_PORT if port is None else port)) == 0


def get_free_port() -> int:
    """Return a port that no program listens at now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def convert_bytes(size: float) -> str:
    """Return a number of bytes in the largest unit in which it is at least 1.

    Args:
        size: the bytes.
    """
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return the attribute of an attribute: `recursive_getattr(model, "encoder.weight")`.

    Args:
        obj: any object.
        attr: names, with dots between them.
    """
    return functools.reduce(getattr, [obj, *attr.split(".")])


def check_os_kernel() -> None:
    """Do nothing: launches notice hangs on every kernel."""


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Return 1 for y, yes, t, true, on and 1, and 0 for n, no, f, false, off and 0.

    Args:
        value: the word, in any case.
        to_bool: return booleans.

    Raises:
        ValueError: it is another word.
    """
    if not value.strip():
        raise ValueError("'' is neither true nor false")
    found = environ.parse_bool(value)
    return found if to_bool else int(found)


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Return the first environment variable that is set to 0 or more.

    Args:
        env_keys: names of variables.
        default: returned where none is.
    """
    values = environ.snapshot()
    found = (int(values[name]) for name in env_keys if name in values)
    return next((value for value in found if value >= 0), default)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return an environment variable as a boolean.

    Args:
        key: its name.
        default: returned where it is not set.

    Raises:
        ValueError: it is neither true nor false.
    """
    return bool(str_to_bool(environ.snapshot().get(key, str(default))))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return the text of an environment variable.

    Args:
        key: its name.
        default: returned where it is not set.
    """
    return environ.snapshot().get(key, str(default))


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return the names of those modules that are imported.

    Args:
        library_names: names of modules.
    """
    return [name for name in library_names if name in sys.modules]


def move_to_device(state: Any, device: torch.device | str) -> Any:
    """Return nested data with its tensors on a device.

    Args:
        state: such as an optimizer's state.
        device: where to move them.
    """
    return send_to_device(state, device)


complete_names(__name__)
