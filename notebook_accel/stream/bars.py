"""In a worker: turns tqdm's bars into progress events."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import threading
from itertools import count
from typing import Any

from ..events import Progress
from .emit import Emitter

_OVERRIDDEN = ("__init__", "__iter__", "update", "display", "close", "reset", "status_printer")


def install(emitter: Emitter) -> None:
    """Change tqdm in this process: a bar that would draw on standard error emits progress events instead.

    The bars of `tqdm.notebook` are widgets of a kernel, which a worker cannot reach. They become plain ones.

    Args:
        emitter: sends the events.
    """
    import tqdm.std

    if "tqdm.notebook" in sys.modules:
        _make_plain(sys.modules["tqdm.notebook"])
    else:
        sys.meta_path.insert(0, _NotebookBarsFinder())
    tqdm.std.tqdm.set_lock(threading.RLock())
    _BarHook(emitter).install(tqdm.std.tqdm)


def _make_plain(notebook: Any) -> None:
    """Let the class of `tqdm.notebook` behave as the plain one that it derives from."""
    for name in _OVERRIDDEN:
        if name in vars(notebook.tqdm_notebook):
            delattr(notebook.tqdm_notebook, name)


class _NotebookBarsFinder(importlib.abc.MetaPathFinder):
    """Changes `tqdm.notebook` when it is imported later."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != "tqdm.notebook":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                _make_plain(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _BarHook:
    """Replaces the two methods through which every tqdm bar draws."""

    def __init__(self, emitter: Emitter) -> None:
        self._emitter = emitter
        self._numbers = count()

    def install(self, bar_class: Any) -> None:
        own_display, own_close, own_printer = bar_class.display, bar_class.close, bar_class.status_printer
        hook = self

        def display(bar: Any, msg: str | None = None, pos: int | None = None, **kwargs: Any) -> Any:
            if not hook._ours(bar):
                return own_display(bar, msg, pos, **kwargs)
            hook._send(bar, finished=False)
            return True

        def close(bar: Any) -> None:
            if not hook._ours(bar) or bar.disable:
                own_close(bar)
                return
            bar.disable = True
            hook._send(bar, finished=True)
            with bar._lock:
                bar._decr_instances(bar)

        def status_printer(file: Any) -> Any:
            if hook._emitter.usable and _is_stderr(file):
                return lambda text: None
            return own_printer(file)

        own_clear, own_moveto = bar_class.clear, bar_class.moveto

        def clear(bar: Any, nolock: bool = False) -> None:
            if not hook._ours(bar):
                own_clear(bar, nolock)

        def moveto(bar: Any, n: int) -> None:
            if not hook._ours(bar):
                own_moveto(bar, n)

        bar_class.clear, bar_class.moveto = clear, moveto
        bar_class.display = display
        bar_class.close = close
        bar_class.status_printer = staticmethod(status_printer)

    def _ours(self, bar: Any) -> bool:
        return self._emitter.usable and _is_stderr(getattr(bar, "fp", None))

    def _send(self, bar: Any, *, finished: bool) -> None:
        if "_notebook_accel_bar" not in bar.__dict__:
            bar._notebook_accel_bar = (
                next(self._numbers),
                abs(bar.pos),
            )  # tqdm moves bars up when others end
        number, position = bar._notebook_accel_bar
        state = bar.format_dict
        emitter = self._emitter
        emitter.emit(
            Progress(
                rank=emitter.rank,
                time=emitter.now(),
                bar=number,
                description=str(bar.desc or "").removesuffix(": "),
                count=float(bar.n),
                total=None if bar.total is None else float(bar.total),
                text=bar.format_meter(**{**state, "ncols": 80, "colour": None}),
                finished=finished,
                leave=abs(bar.pos) == 0 if bar.leave is None else bool(bar.leave),
                position=position,
            )
        )


def _is_stderr(file: Any) -> bool:
    """Return True if tqdm's file, which it may wrap, is this process's standard error or output, old or new."""
    for _ in range(3):
        wrapped = getattr(file, "_wrapped", None)
        if wrapped is None:
            break
        file = wrapped
    if file in (sys.stderr, sys.__stderr__, sys.stdout, sys.__stdout__):
        return True
    return type(file).__name__ == "OutStream"
