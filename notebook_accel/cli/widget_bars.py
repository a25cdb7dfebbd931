"""Progress bars that a notebook shows as widgets, as those of `tqdm.auto` are: their texts, for a terminal."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import Any, Final

VIEW: Final = "application/vnd.jupyter.widget-view+json"
_REFERENCE: Final = "IPY_MODEL_"
_TAG: Final = re.compile(r"<[^>]*>")
_BARS: Final = ("FloatProgressModel", "IntProgressModel")
_SHAPE: Final = (("HTMLModel",), _BARS, ("HTMLModel",))
_OVER: Final = ("success", "danger")
"""How tqdm styles a bar that changes no more."""


class WidgetBars:
    """The bars of a kernel that are widgets as tqdm makes them: a box with a text, a bar and a text."""

    def __init__(self) -> None:
        self._states: dict[str, dict[str, Any]] = {}
        self._box_of: dict[str, str] = {}  # by the id of a part

    def note(self, kind: str, content: Mapping[str, Any]) -> str:
        """Note what a message says of a widget.

        Args:
            kind: of the message.
            content: of the message.

        Returns:
            The id of the bar that may look different now, of those that were found; empty for none.
        """
        name = content.get("comm_id", "")
        state = (content.get("data") or {}).get("state") or {}
        if kind == "comm_open" and content.get("target_name") == "jupyter.widget":
            self._states[name] = dict(state)
        elif kind == "comm_msg" and name in self._states:
            self._states[name].update(state)
        elif kind == "comm_close":
            self._states.pop(name, None)
        return self._box_of.get(name, "")

    def find(self, name: str) -> bool:
        """Return whether a widget is a bar; its changes are told from then on.

        Args:
            name: id of the widget's model.
        """
        box = self._states.get(name, {})
        parts = [str(child).removeprefix(_REFERENCE) for child in box.get("children") or ()]
        kinds = [self._states.get(part, {}).get("_model_name") for part in parts]
        if len(kinds) != len(_SHAPE) or not all(map(lambda kind, wanted: kind in wanted, kinds, _SHAPE)):
            return False
        layout = str(box.get("layout", "")).removeprefix(_REFERENCE)
        self._box_of.update(dict.fromkeys([name, *parts, layout], name))
        return True

    def read(self, name: str) -> str:
        """Return the text of a bar that was found, empty where it is hidden or closed.

        Args:
            name: id of its box.
        """
        box = self._states.get(name, {})
        layout = self._states.get(str(box.get("layout", "")).removeprefix(_REFERENCE), {})
        if layout.get("visibility") == "hidden" or layout.get("display") == "none":
            return ""
        parts = [
            self._states.get(str(child).removeprefix(_REFERENCE), {}) for child in box.get("children") or ()
        ]
        texts = [str(part.get("value", "")) for part in parts if part.get("_model_name") not in _BARS]
        return " ".join(html.unescape(_TAG.sub("", " ".join(texts))).split())

    def is_over(self, name: str) -> bool:
        """Return whether a bar changes no more.

        Args:
            name: id of its box.
        """
        children = self._states.get(name, {}).get("children") or ()
        parts = [self._states.get(str(child).removeprefix(_REFERENCE), {}) for child in children]
        return not parts or any(part.get("bar_style") in _OVER for part in parts)
