"""A traceback, from the worker to the notebook.

There it is made of stub code objects with the names, files, lines and columns of the worker's, so that IPython,
pdb and `traceback` show it as any other, with the lines of the cells.
"""

from __future__ import annotations

import ast
import contextlib
import sys
import types
from collections.abc import Sequence
from itertools import islice
from typing import Any

from ...events import Frame


def read_frames(traceback: types.TracebackType | None) -> list[Frame]:
    """In the worker: return a traceback's frames, outermost first, without those that have `__tracebackhide__`."""
    found = []
    while traceback is not None:
        hidden = "__tracebackhide__" in traceback.tb_frame.f_code.co_varnames
        if traceback.tb_next is None or not hidden:
            found.append(_read_frame(traceback))
        traceback = traceback.tb_next
    return found


def _read_frame(traceback: types.TracebackType) -> Frame:
    code = traceback.tb_frame.f_code
    return Frame(
        filename=code.co_filename,
        lineno=traceback.tb_lineno,
        first_lineno=code.co_firstlineno,
        name=code.co_name,
        qualname=getattr(code, "co_qualname", code.co_name),
        columns=_find_columns(code, traceback.tb_lasti),
    )


def _find_columns(code: types.CodeType, last_instruction: int) -> tuple[int, int, int] | None:
    if sys.version_info < (3, 11) or last_instruction < 0:
        return None
    position = next(islice(code.co_positions(), last_instruction // 2, None), None)
    if position is None or None in position:
        return None
    _, end_line, start, end = position
    assert end_line is not None and start is not None and end is not None
    return end_line, start, end


def build(parts: Sequence[Frame]) -> types.TracebackType | None:
    """In the notebook: make a traceback of frames, outermost first; None of no frames."""
    result: types.TracebackType | None = None
    for frame in reversed(parts):
        with contextlib.suppress(ValueError, OverflowError):  # of a peer that makes up files and lines
            made = _raise_in(_make_stub(frame))
            if made is not None:
                result = types.TracebackType(result, made.tb_frame, made.tb_lasti, frame.lineno)
    return result


class _Stub(Exception):
    pass


def _raise_in(code: types.CodeType) -> types.TracebackType | None:
    try:
        exec(code, {"stub": _Stub(), "__name__": "notebook_accel.worker"})
    except _Stub as raised:
        return raised.__traceback__.tb_next if raised.__traceback__ is not None else None
    return None


def _make_stub(frame: Frame) -> types.CodeType:
    """Return the code of a function that raises at the frame's place."""
    tree = ast.parse("def worker(): raise stub")
    end_line, start, end = frame.columns or (frame.lineno, -1, -1)
    for node in ast.walk(tree.body[0]):
        _move(node, frame.lineno, start, max(end_line, frame.lineno), end)
    _move(tree.body[0], frame.first_lineno, 0, frame.first_lineno, 0)
    module = compile(tree, frame.filename, "exec")
    code: types.CodeType = next(part for part in module.co_consts if isinstance(part, types.CodeType))
    if sys.version_info >= (3, 11):
        code = code.replace(co_qualname=frame.qualname)
    return code.replace(co_name=frame.name)


def _move(node: Any, line: int, start: int, end_line: int, end: int) -> None:
    node.lineno, node.col_offset, node.end_lineno, node.end_col_offset = line, start, end_line, end
