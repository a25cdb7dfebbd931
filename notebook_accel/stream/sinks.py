"""In the notebook: shows a run's events in the cell."""

from __future__ import annotations

import shutil
import string
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, Literal

from .. import probes
from ..events import ClearOutput, Display, Event, Lines, Notice, Phase, Progress, Stream, Unfinished
from ..notices import tell

Output = Literal["all", "first", "none"] | Collection[int]

DEFAULT_PREFIX = "[${rank}] "
_LIVE_SECONDS = 0.1  # between two states of a row that changes
_MAX_ROWS = 8  # at the end of a terminal
Key = tuple[int, int | str]
"""Rank and stream of an unfinished line, or `_BAR` and the number of a bar: the bars of one rank are shown."""
_BAR = -1


class Sink(ABC):
    """Shows a run, event by event."""

    @abstractmethod
    def show(self, events: Sequence[Event]) -> None:
        """Show the next events.

        Args:
            events: in order. It is called several times a second, also without events.
        """

    @abstractmethod
    def note(self, text: str) -> None:
        """Show a message of the launcher itself.

        Args:
            text: one line or several.
        """

    @abstractmethod
    def close(self) -> None:
        """Show the end of the run."""

    def again(self) -> bool:
        """Show the run once more, in the cell that runs now.

        Returns:
            False if this sink cannot.
        """
        return False


def close_sink(sink: Sink) -> None:
    """Close a sink. If that fails, it is told on stderr: a broken view does not make a run fail.

    Args:
        sink: of a run that has ended.
    """
    try:
        sink.close()
    except Exception as error:
        tell(f"the run's output could not be shown: {error!r}")


class TextSink(Sink):
    """Writes lines to the cell or terminal that runs, marked by rank; shows displays and one rank's bars.

    Args:
        output: ranks to show: "all", "first" (the first on this node), "none" or a collection of ranks.
        prefix: `string.Template` put before each line where more than one rank is shown; may name rank,
            local_rank and role_name.
    """

    def __init__(self, output: Output, prefix: str | None = None) -> None:
        self._output = output
        self._prefix = prefix
        self._ranks: set[int] = set()
        self._prefixes: dict[int, str] = {}
        self._shared_prefix: str | None = None  # the template, once several ranks are shown
        self._last: int | None = None  # whose line or display came last
        self._live: LiveRows = CellRows() if probes.find_kernel_shell() is not None else TerminalRows()

    def _start(self, rank: int) -> None:
        """Add a rank of this node; choose again which ranks are shown, and their prefixes."""
        known = len(self._ranks)
        self._ranks.add(rank)
        first = min(self._ranks)
        if known > 1 and rank != first:  # what the others show does not change with it
            is_chosen = self._output == "all" or (not isinstance(self._output, str) and rank in self._output)
            if is_chosen and self._shared_prefix is not None:
                self._prefixes[rank] = _write_prefix(self._shared_prefix, rank, first)
                return
            if not is_chosen:
                return
        shown = {"all": self._ranks, "first": {first}, "none": set[int]()}
        chosen = shown[self._output] if isinstance(self._output, str) else set(self._output) & self._ranks
        prefix = self._prefix
        if prefix is None:
            several = len(chosen) > 1 or (not isinstance(self._output, str) and len(set(self._output)) > 1)
            prefix = DEFAULT_PREFIX if several else ""
        self._shared_prefix = prefix if len(chosen) > 1 else None
        self._prefixes = {rank: _write_prefix(prefix, rank, first) for rank in chosen}

    def show(self, events: Sequence[Event]) -> None:
        """Show the next events of the run.

        Args:
            events: in order.
        """
        pending: list[str] = []
        stream: Stream = "stdout"
        for event in events:
            if isinstance(event, Lines):
                if self._live.has_rows:
                    self._live.finish(event)
                if event.rank in self._prefixes:
                    if event.stream != stream:
                        self._write(stream, pending)
                        stream, pending = event.stream, []
                    pending.append(join_lines(event.texts, self._prefixes[event.rank]))
                    self._last = event.rank
                continue
            self._write(stream, pending)
            pending = []
            if isinstance(event, Notice):
                self.note(event.text)
            elif isinstance(event, Phase):
                if event.name == "starting" and event.rank >= 0:
                    self._start(event.rank)
                elif event.name == "starting" and event.detail:
                    self._write("stdout", [f"{event.detail}\n"])
                elif event.name == "restarting":
                    self._ranks.clear()
                    self._shared_prefix = None
                    self._live.restart()
                    self.note(event.detail)
            elif event.rank in self._prefixes:
                self._show_other(event)
        self._write(stream, pending)
        self._live.draw()

    def _write(self, stream: str, lines: Sequence[str]) -> None:
        if lines:
            self._live.clear()
            write_lines(stream, lines)

    def note(self, text: str) -> None:
        """Write a message of the launcher itself.

        Args:
            text: one line or several.
        """
        self._write("stderr", [f"notebook_accel: {line}\n" for line in text.splitlines()])

    def close(self) -> None:
        """Draw what is not drawn yet; return when the front end has been sent everything."""
        self._live.close()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()

    def _show_other(self, event: Event) -> None:
        if not isinstance(event, Display):  # a row of another rank may stand there, or nothing any more
            self._last = None
        if isinstance(event, Unfinished):
            self._live.show_unfinished(event, self._prefixes[event.rank])
        elif isinstance(event, Progress):
            self._live.show_bar(event)
        elif isinstance(event, Display):
            if not event.update:
                prefix = self._prefixes[event.rank].strip()
                if prefix and self._last != event.rank:
                    self._write("stdout", [f"{prefix}\n"])  # whose it is
                self._last = event.rank
            publish(event.data, event.metadata, event.transient, update=event.update)
        elif isinstance(event, ClearOutput) and probes.find_kernel_shell() is not None:
            from IPython.display import clear_output

            clear_output(wait=event.wait)


def _write_prefix(template: str, rank: int, first: int) -> str:
    return string.Template(template).safe_substitute(rank=rank, local_rank=rank - first, role_name="worker")


def publish(data: Any, metadata: Any = None, transient: Any = None, *, update: bool = False) -> None:
    """Publish a MIME bundle to the notebook; in a terminal print its plain text.

    Args:
        data: the bundle, by MIME type.
        metadata: by MIME type.
        transient: may have a `display_id`.
        update: change the display of that id.
    """
    if probes.find_kernel_shell() is None:
        if not update:
            print(data.get("text/plain", ""))
        return
    from IPython.display import publish_display_data

    shown = {kind: escape_surrogates(part) if isinstance(part, str) else part for kind, part in data.items()}
    publish_display_data(shown, dict(metadata or {}), transient=dict(transient or {}), update=update)


def escape_surrogates(text: str) -> str:
    """Return a text that can be sent: names of metrics and files may have halves of characters, which UTF-8 has not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="backslashreplace").decode()
    return text


class LiveRows(ABC):
    """Rows that change: the bars of the first rank that has bars, and unfinished lines of all ranks.

    Attributes:
        has_rows: whether there are unfinished lines.
    """

    def __init__(self) -> None:
        self._unfinished: set[Key] = set()
        self._bar_rank: int | None = None

    @property
    def has_rows(self) -> bool:
        return bool(self._unfinished)

    def show_bar(self, bar: Progress) -> None:
        """Show the state of a bar; one that leaves nothing is removed at its end."""
        if self._bar_rank is None or bar.rank < self._bar_rank:
            self._bar_rank = bar.rank
            self._forget_bars()
        if bar.rank != self._bar_rank:
            return
        if bar.finished:
            self._end((_BAR, bar.bar), bar.text if bar.leave else "")
        else:
            self._show((_BAR, bar.bar), bar.text)

    def show_unfinished(self, event: Unfinished, prefix: str = "") -> None:
        """Show an unfinished line, after a prefix."""
        key = (event.rank, event.stream)
        self._unfinished.add(key)
        self._show(key, prefix + event.text if event.text.strip() else "")

    def finish(self, lines: Lines) -> None:
        """Remove the unfinished line that lines have replaced."""
        if (key := (lines.rank, lines.stream)) in self._unfinished:
            self._unfinished.discard(key)
            self._end(key, "")

    def restart(self) -> None:
        """Forget the bars of ranks that have ended."""
        self._bar_rank = None
        self._forget_bars()

    @abstractmethod
    def draw(self) -> None:
        """Draw what is due."""

    @abstractmethod
    def clear(self) -> None:
        """Make room for lines that are written next."""

    @abstractmethod
    def close(self) -> None:
        """Draw what has to stay."""

    @abstractmethod
    def _forget_bars(self) -> None: ...

    @abstractmethod
    def _show(self, key: Key, text: str) -> None: ...

    @abstractmethod
    def _end(self, key: Key, text: str) -> None: ...


class CellRows(LiveRows):
    """Each row is a display of the cell, which is updated."""

    def __init__(self) -> None:
        super().__init__()
        self._name = uuid.uuid4().hex  # an update changes every display of the notebook that has its id
        self._shown: dict[Key, str] = {}
        self._due: dict[Key, float] = {}
        self._waiting: dict[Key, str] = {}

    def draw(self) -> None:
        """Update the displays whose text has changed, each ten times a second at most."""
        now = time.monotonic()
        for key in [key for key in self._waiting if now >= self._due.get(key, 0.0)]:
            self._due[key] = now + _LIVE_SECONDS
            self._publish(key, self._waiting.pop(key))

    def clear(self) -> None:
        """Do nothing: displays have their own places."""

    def close(self) -> None:
        """Draw what is not drawn yet."""
        while self._waiting:
            self._publish(*self._waiting.popitem())

    def _forget_bars(self) -> None:
        """Do nothing: the next bars take their displays."""

    def _show(self, key: Key, text: str) -> None:
        self._waiting[key] = text
        self.draw()

    def _end(self, key: Key, text: str) -> None:
        self._waiting.pop(key, None)
        if text or key in self._shown:
            self._publish(key, text)

    def _publish(self, key: Key, text: str) -> None:
        known = key in self._shown
        if not known and not text:
            return
        if self._shown.get(key) != text:
            self._shown[key] = text
            name = f"notebook-accel-{self._name}-{key[0]}-{key[1]}"
            publish({"text/plain": text}, transient={"display_id": name}, update=known)


class TerminalRows(LiveRows):
    """The last rows of a terminal: bars, and the unfinished lines of the first rank that has one.

    In a file there are only the last states of bars.

    Attributes:
        is_live: whether the errors go to a terminal.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_live = sys.stderr is not None and sys.stderr.isatty()
        self._texts: dict[Key, str] = {}
        self._drawn: list[str] = []
        self._drawn_at = 0.0

    def draw(self) -> None:
        """Draw the rows where they have changed, ten times a second at most."""
        rows = self._list_rows() if self.is_live else []
        if rows != self._drawn and time.monotonic() - self._drawn_at >= _LIVE_SECONDS:
            width = shutil.get_terminal_size().columns - 1  # what fits into a row can be removed
            write_lines("stderr", [self._erase() + "\n".join(row[:width] for row in rows)])
            self._drawn, self._drawn_at = rows, time.monotonic()

    def clear(self) -> None:
        """Remove the rows; the next `draw` brings them back."""
        if self._drawn:
            write_lines("stderr", [self._erase()])
            self._drawn, self._drawn_at = [], 0.0

    def close(self) -> None:
        """Remove the rows."""
        self.clear()

    def _list_rows(self) -> list[str]:
        first = min((key[0] for key in self._unfinished if self._texts.get(key)), default=None)
        texts = [text for key, text in self._texts.items() if key not in self._unfinished or key[0] == first]
        return [row for text in texts for row in text.split("\n") if row][-_MAX_ROWS:]

    def _erase(self) -> str:
        return "\r\x1b[K" + "\x1b[A\x1b[K" * (len(self._drawn) - 1)

    def _forget_bars(self) -> None:
        self._texts = {key: text for key, text in self._texts.items() if key[0] != _BAR}

    def _show(self, key: Key, text: str) -> None:
        self._texts[key] = text
        self.draw()

    def _end(self, key: Key, text: str) -> None:
        if self._texts.pop(key, ""):
            self.clear()
        if text:
            self.clear()
            write_lines("stderr", [f"{text}\n"])


def join_lines(texts: Sequence[str], prefix: str = "") -> str:
    """Return lines as one text, each with its newline.

    Args:
        texts: at least one.
        prefix: put before each.
    """
    between = f"\n{prefix}"
    return f"{prefix}{between.join(texts)}\n"


def write_lines(stream: str, lines: Sequence[str]) -> None:
    """Write lines to this process's output or error stream; what its encoding lacks comes as an escape.

    They are on their way afterwards: a kernel sends them by itself, a script's stream would keep them in its buffer.

    Args:
        stream: `stdout` or `stderr`.
        lines: each with its newline.
    """
    target = sys.stdout if stream == "stdout" else sys.stderr
    if not lines or target is None:
        return
    text = "".join(lines)
    try:
        target.write(text)
    except UnicodeEncodeError:
        encoding = target.encoding or "ascii"
        target.write(text.encode(encoding, "backslashreplace").decode(encoding))
    if probes.find_kernel_shell() is None:
        target.flush()
