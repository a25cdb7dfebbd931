"""Progress bars that a notebook shows as widgets, as those of `tqdm.auto` are: their texts, for a terminal."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

_REFERENCE: Final = "IPY_MODEL_"
_TAG: Final = re.compile(r"<[^>]*>")
_BARS: Final = ("FloatProgressModel", "IntProgressModel")
_TEXTS: Final = ("HTMLModel", "HTMLMathModel", "LabelModel")
VIEW: Final = "application/vnd.jupyter.widget-view+json"


class WidgetBars:
    """The widgets of a kernel, as its messages tell of them."""

    def __init__(self) -> None:
        self._states: dict[str, dict[str, Any]] = {}

    def note(self, kind: str, content: Mapping[str, Any]) -> bool:
        """Note what a message says of a widget.

        Args:
            kind: of the message.
            content: of the message.

        Returns:
            Whether something may look different now.
        """
        name = content.get("comm_id", "")
        state = (content.get("data") or {}).get("state") or {}
        if kind == "comm_open" and content.get("target_name") == "jupyter.widget":
            self._states[name] = dict(state)
        elif kind == "comm_msg" and name in self._states:
            self._states[name].update(state)
        elif kind == "comm_close":
            return self._states.pop(name, None) is not None
        else:
            return False
        return True

    def find_text(self, name: str) -> str | None:
        """Return the text of a widget that holds a bar, empty where it is hidden; None for others, and closed ones.

        Args:
            name: id of the widget's model.
        """
        if name not in self._states:
            return None
        states = list(self._walk(name, set()))
        if not states:
            return ""
        if not any(state.get("_model_name") in _BARS for state in states):
            return None
        texts = [str(state.get("value", "")) for state in states if state.get("_model_name") in _TEXTS]
        return " ".join(html.unescape(_TAG.sub("", " ".join(texts))).split())

    def _walk(self, name: str, seen: set[str]) -> Iterator[dict[str, Any]]:
        """Iterate the states of a widget and of those in it, in their order, but of what is hidden."""
        state = self._states.get(name)
        if state is None or name in seen or self._is_hidden(state):
            return
        seen.add(name)
        yield state
        for child in state.get("children") or ():
            yield from self._walk(str(child).removeprefix(_REFERENCE), seen)

    def _is_hidden(self, state: Mapping[str, Any]) -> bool:
        layout = self._states.get(str(state.get("layout", "")).removeprefix(_REFERENCE), {})
        return layout.get("visibility") == "hidden" or layout.get("display") == "none"
