"""HfDeepSpeedConfig: DeepSpeed's own configuration, read from a JSON file or a dict."""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

AUTO: Final = "auto"


class HfDeepSpeedConfig:
    """DeepSpeed's configuration as nested dicts.

    A key is the path to a value, its parts joined by dots: `zero_optimization.stage`.

    Args:
        config_file_or_dict: path of a JSON file, a dict (which is copied), or JSON itself, as text or in base64.

    Raises:
        ValueError: it is none of these.
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        self.config: dict[str, Any] = _read(config_file_or_dict)
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Read the ZeRO stage, -1 where the config has none, and whether weights or optimizer state are offloaded."""
        self._stage = self.get_value("zero_optimization.stage", -1)
        places = (
            self.get_value(f"zero_optimization.offload_{what}.device") for what in ("optimizer", "param")
        )
        self._offload = self._stage in (2, 3) and any(place in ("cpu", "nvme") for place in places)

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the dict that holds a key's value, and the last part of the key.

        Args:
            ds_key_long: the path to a value, such as `zero_optimization.stage`.

        Returns:
            None instead of the dict where the config has no such dict.
        """
        *parents, last = ds_key_long.split(".")
        node: Any = self.config
        for name in parents:
            node = node.get(name) if isinstance(node, dict) else None
        return (node if isinstance(node, dict) else None), last

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a key.

        Args:
            ds_key_long: see `find_config_node`.
            default: returned where the key has no value.
        """
        node, last = self.find_config_node(ds_key_long)
        return default if node is None else node.get(last, default)

    def set_value(self, ds_key_long: str, value: Any) -> None:
        """Set the value of a key, and create the dicts that lead to it; a null in the place of one is none.

        Args:
            ds_key_long: see `find_config_node`.
            value: the new value.
        """
        *parents, last = ds_key_long.split(".")
        node = self.config
        for name in parents:
            if node.get(name) is None:
                node[name] = {}
            node = node[name]
        node[last] = value

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove a key and everything below it.

        Args:
            ds_key_long: see `find_config_node`.
            must_exist: whether a missing key is an error.

        Raises:
            ValueError: the key is missing and has to exist.
        """
        node, last = self.find_config_node(ds_key_long)
        if node is not None and last in node:
            del node[last]
        elif must_exist:
            raise ValueError(f"there is no {ds_key_long} in the DeepSpeed config: {self.config}")

    def is_true(self, ds_key_long: str) -> bool:
        """Return True if the key has a true value."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Return True if the key has a false value; a key without a value is not false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Return True for ZeRO stage 2."""
        return bool(self._stage == 2)

    def is_zero3(self) -> bool:
        """Return True for ZeRO stage 3."""
        return bool(self._stage == 3)

    def is_offload(self) -> bool:
        """Return True if ZeRO 2 or 3 offloads weights or optimizer state to the CPU or to NVMe."""
        return self._offload


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key of a config with its value, such as `("fp16.enabled", True)`.

    Args:
        config: nested dicts.
        prefix: put before every key; ends with a dot or is empty.
    """
    for name, value in config.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _read(source: Any) -> dict[str, Any]:
    if isinstance(source, HfDeepSpeedConfig):
        source = source.config
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    if not isinstance(source, (str, os.PathLike)):
        raise ValueError(
            f"a DeepSpeed config is the path of a JSON file or a dict, not {type(source).__name__} {source!r}"
        )
    if os.path.isfile(source):
        return _parse(Path(source).read_text(encoding="utf-8"), f"DeepSpeed config {os.fspath(source)}")
    text = os.fspath(source)
    if text.lstrip().startswith("{"):
        return _parse(text, "the DeepSpeed config given as text")
    decoded = ""
    with contextlib.suppress(ValueError):  # it is not base64, so it must be a path
        decoded = base64.urlsafe_b64decode(text).decode("utf-8")
    if decoded.lstrip().startswith("{"):
        return _parse(decoded, "the DeepSpeed config given in base64")
    raise ValueError(
        f"DeepSpeed config {text!r} does not exist in {Path.cwd()}: give the path of a JSON file or a dict"
    )


def _parse(text: str, what: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{what} holds a {type(found).__name__}, not an object in braces")
    return found
