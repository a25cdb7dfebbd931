"""Builds models for their shapes alone, on torch's meta device, from an import path or a config of transformers."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import probes
from ..big_modeling.init import redirect_registration

Arguments = Sequence[Any] | Mapping[str, Any]
"""Positional arguments or keyword arguments."""


def from_import_path(text: str, arguments: Arguments = ()) -> torch.nn.Module:
    """Return the module that an import path names, or that the class or function it names makes.

    Args:
        text: `package.module:name`. Modules in the current folder can be imported.
        arguments: for the class or function.

    Raises:
        ValueError: the path is wrong, or the code that it names raised; the message says which.
    """
    name, _, attribute = text.partition(":")
    found = _import(name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{name} has no {attribute!r}{hint}")
        found = getattr(found, part)
    if isinstance(found, torch.nn.Module):
        if arguments:
            raise ValueError(f"{text} is a model already and takes no arguments")
        return found
    if not callable(found) or (isinstance(found, type) and not issubclass(found, torch.nn.Module)):
        what = "class" if isinstance(found, type) else "value"
        shown = found.__name__ if isinstance(found, type) else type(found).__name__
        raise ValueError(
            f"{text} is a {what} ({shown}), neither a torch.nn.Module nor a function that makes one"
        )
    _check_arguments(text, found, arguments)
    call = (lambda: found(**arguments)) if isinstance(arguments, Mapping) else (lambda: found(*arguments))
    made = build(call, text)
    if not isinstance(made, torch.nn.Module):
        raise ValueError(f"{text} returned a {type(made).__name__}, no torch.nn.Module")
    return made


def _import(name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        with _without_values():  # models that a module makes when it is imported
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ValueError(f"there is no module {error.name!r}, neither installed nor in {here}") from error
        raise ValueError(f"{name} cannot be imported: {_sentence(error)}") from error
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        raise ValueError(f"{name} cannot be imported: {_sentence(error)}") from error


def _check_arguments(text: str, function: Callable[..., Any], arguments: Arguments) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have none
        return
    try:
        signature.bind(**arguments) if isinstance(arguments, Mapping) else signature.bind(*arguments)
    except TypeError as error:
        raise ValueError(
            f"{text} takes {signature}: {error}; give arguments as JSON, --args '{{\"name\": value}}' or '[value]'"
        ) from error


def build(make: Callable[[], Any], what: str) -> Any:
    """Call `make` so that the parameters and buffers it creates are on the meta device.

    A model that reads values while it is built cannot be built there. It is built a second time on the CPU, where each
    tensor moves to the meta device as soon as it is part of a module.

    Args:
        make: makes a module.
        what: its name in the error.

    Returns:
        What `make` returned.

    Raises:
        ValueError: it raised.
    """
    try:
        with torch.device("meta"):
            return make()
    except (Exception, SystemExit):  # for example of an .item(): the meta device has no values
        try:
            with _without_values():
                return make()
        except (Exception, SystemExit) as error:  # whatever the user's code raises
            raise ValueError(f"{what} cannot be built: {_sentence(error)}") from error


def _without_values() -> contextlib.AbstractContextManager[None]:
    """Within the block, tensors that become part of a module lose their values and keep their shapes."""
    return redirect_registration(torch.device("meta"), include_buffers=True)


def from_transformers(source: str, *, trust_remote_code: bool = False) -> torch.nn.Module:
    """Return a model of transformers, made from its config.

    Args:
        source: a folder with `config.json`, such a file, or a hub id.
        trust_remote_code: let transformers run code that comes with the config.

    Raises:
        ValueError: transformers is missing, finds no config, or cannot make the model.
    """
    if not probes.is_available("transformers"):
        raise ValueError(f"{source} needs transformers: pip install transformers")
    transformers: Any = importlib.import_module("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        hint = "" if Path(source).exists() else ", and no file or folder has this name"
        raise ValueError(f"transformers finds no config of {source!r}{hint}: {_sentence(error)}") from error
    foreign = [name for name in getattr(config, "auto_map", None) or {} if name.startswith("AutoModel")]
    own = [name for name in getattr(config, "architectures", None) or () if hasattr(transformers, name)]

    def make() -> Any:
        if foreign and trust_remote_code:
            return getattr(transformers, foreign[0]).from_config(config, trust_remote_code=True)
        return getattr(transformers, own[0])(config) if own else transformers.AutoModel.from_config(config)

    model: torch.nn.Module = build(make, source)
    return model


def from_timm(name: str) -> torch.nn.Module:
    """Return a model of timm.

    Args:
        name: its name in timm, or a hub id.

    Raises:
        ValueError: timm is missing or cannot make the model.
    """
    if not probes.is_available("timm"):
        raise ValueError(f"{name} needs timm: pip install timm")
    timm: Any = importlib.import_module("timm")
    full = f"hf-hub:{name}" if "/" in name else name
    model: torch.nn.Module = build(lambda: timm.create_model(full, pretrained=False), name)
    return model


def _sentence(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
