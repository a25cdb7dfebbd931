"""In the notebook: shows a run's events in the cell."""

from __future__ import annotations

import string
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

from ..events import ClearOutput, Display, Event, Line, Notice, Phase, Progress

Output = Literal["all", "first", "none"] | Collection[int]

DEFAULT_PREFIX = "[${rank}] "
_BAR_INTERVAL = 0.1


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
        self._bars = _Bars()

    def _start(self, rank: int) -> None:
        """Add a rank of this node; choose again which ranks are shown, and their prefixes."""
        self._ranks.add(rank)
        first = min(self._ranks)
        shown = {"all": self._ranks, "first": {first}, "none": set[int]()}
        chosen = shown[self._output] if isinstance(self._output, str) else set(self._output) & self._ranks
        prefix = self._prefix
        if prefix is None:
            several = len(chosen) > 1 or (not isinstance(self._output, str) and len(set(self._output)) > 1)
            prefix = DEFAULT_PREFIX if several else ""
        template = string.Template(prefix)
        self._prefixes = {
            rank: template.safe_substitute(rank=rank, local_rank=rank - first, role_name="worker")
            for rank in chosen
        }

    def show(self, events: Sequence[Event]) -> None:
        """Show the next events of the run.

        Args:
            events: in order.
        """
        pending: list[str] = []
        stream = "stdout"
        for event in events:
            if isinstance(event, Line) and event.stream == stream and event.rank in self._prefixes:
                pending.append(f"{self._prefixes[event.rank]}{event.text}\n")
                continue
            write_lines(stream, pending)
            pending = []
            if isinstance(event, Line):
                if event.rank in self._prefixes:
                    stream = event.stream
                    pending.append(f"{self._prefixes[event.rank]}{event.text}\n")
            elif isinstance(event, Notice):
                self.note(event.text)
            elif isinstance(event, Phase):
                if event.name == "starting" and event.rank >= 0:
                    self._start(event.rank)
                elif event.name == "starting" and event.detail:
                    write_lines("stdout", [f"{event.detail}\n"])
                elif event.name == "restarting":
                    self._ranks.clear()
                    self.note(event.detail)
            elif event.rank in self._prefixes:
                self._show_other(event)
        write_lines(stream, pending)

    def note(self, text: str) -> None:
        """Write a message of the launcher itself.

        Args:
            text: one line or several.
        """
        write_lines("stderr", [f"notebook_accel: {line}\n" for line in text.splitlines()])

    def close(self) -> None:
        """Draw the bars that are not drawn yet; return when the front end has been sent everything."""
        self._bars.close()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()

    def _show_other(self, event: Event) -> None:
        if isinstance(event, Progress):
            self._bars.show(event)
        elif isinstance(event, Display):
            publish(event.data, event.metadata, event.transient, update=event.update)
        elif isinstance(event, ClearOutput) and kernel_shell() is not None:
            from IPython.display import clear_output

            clear_output(wait=event.wait)


def publish(data: Any, metadata: Any = None, transient: Any = None, *, update: bool = False) -> None:
    """Publish a MIME bundle to the notebook; in a terminal print its plain text.

    Args:
        data: the bundle, by MIME type.
        metadata: by MIME type.
        transient: may have a `display_id`.
        update: change the display of that id.
    """
    if kernel_shell() is None:
        if not update:
            print(data.get("text/plain", ""))
        return
    from IPython.display import publish_display_data

    publish_display_data(dict(data), dict(metadata or {}), transient=dict(transient or {}), update=update)


class _Bars:
    """Shows the bars of the first rank that has bars, each as one display that changes."""

    def __init__(self) -> None:
        self._rank: int | None = None
        self._drawn: dict[int, float] = {}
        self._waiting: dict[int, Progress] = {}
        self._draw: Callable[[Progress], None] = _CellBar() if kernel_shell() is not None else _TerminalBar()

    def show(self, bar: Progress) -> None:
        if self._rank is None or bar.rank < self._rank:
            self._rank = bar.rank
        if bar.rank != self._rank:
            return
        now = time.monotonic()
        if not bar.finished and now - self._drawn.get(bar.bar, 0.0) < _BAR_INTERVAL:
            self._waiting[bar.bar] = bar
            return
        self._waiting.pop(bar.bar, None)
        self._drawn[bar.bar] = now
        self._draw(bar)

    def close(self) -> None:
        for bar in self._waiting.values():
            self._draw(bar)
        self._waiting.clear()


class _CellBar:
    """A bar in a notebook cell: one display that is updated."""

    def __init__(self) -> None:
        self._ids: dict[int, str] = {}
        self._name = uuid.uuid4().hex  # an update changes every display of the notebook that has its id

    def __call__(self, bar: Progress) -> None:
        known = bar.bar in self._ids
        display_id = self._ids.setdefault(bar.bar, f"notebook-accel-{self._name}-{bar.bar}")
        text = bar.text if bar.leave or not bar.finished else ""
        publish({"text/plain": text}, transient={"display_id": display_id}, update=known)


class _TerminalBar:
    """A bar in a terminal: one line that is overwritten; in a file only its last state."""

    def __call__(self, bar: Progress) -> None:
        if sys.stderr.isatty():
            end = "\n" if bar.finished and bar.leave else ""
            sys.stderr.write(f"\r\x1b[K{bar.text}{end}")
            sys.stderr.flush()
        elif bar.finished and bar.leave:
            sys.stderr.write(f"{bar.text}\n")


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
    if kernel_shell() is None:
        target.flush()


def kernel_shell() -> Any:
    """Return the shell of the running IPython kernel, or None.

    IPython in a terminal does not count: it cannot update displays.
    """
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return shell if shell is not None and hasattr(shell, "kernel") else None
