"""A traceback, from the worker to the notebook.

There it is made of stub code objects with the names, files, lines and columns of the worker's, so that IPython,
pdb and `traceback` show it as any other, with the lines of the cells.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Sequence
from itertools import islice

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


_MAX_LINES = 1 << 14  # of a function; a peer may make up any


class _Stub(Exception):
    pass


def _raise_in(code: types.CodeType) -> types.TracebackType | None:
    try:
        exec(code, {"stub": _Stub(), "__name__": "notebook_accel.worker"})
    except _Stub as raised:
        return raised.__traceback__.tb_next if raised.__traceback__ is not None else None
    return None


def _make_stub(frame: Frame) -> types.CodeType:
    down = min(max(frame.lineno - frame.first_lineno, 0), _MAX_LINES)
    before = "\n" * down if sys.version_info < (3, 11) else ""  # later ones have a table of locations
    code = compile(before + "raise stub", frame.filename, "exec")
    code = code.replace(co_name=frame.name, co_firstlineno=max(frame.first_lineno, 1))
    if sys.version_info >= (3, 11):
        code = code.replace(co_qualname=frame.qualname)
        with contextlib.suppress(ValueError, TypeError):
            code = code.replace(co_linetable=_encode_locations(len(code.co_code) // 2, frame))
    return code


_NO_COLUMNS, _LONG = 13, 14


def _encode_locations(units: int, frame: Frame) -> bytes:
    """Return a location table in which all code units have the frame's position.

    The format is that of CPython 3.11 to 3.14, Objects/locations.md (InternalDocs/code_objects.md).
    """
    table = bytearray()
    down = frame.lineno - frame.first_lineno
    while units > 0:
        length = min(units, 8)
        kind = _NO_COLUMNS if frame.columns is None else _LONG
        table.append(0x80 | kind << 3 | length - 1)
        table += _encode_varint(-down << 1 | 1 if down < 0 else down << 1)
        if frame.columns is not None:
            end_line, start, end = frame.columns
            for number in (max(end_line - frame.lineno, 0), start + 1, end + 1):
                table += _encode_varint(number)
        down = 0
        units -= length
    return bytes(table)


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value >= 64:
        out.append(0x40 | value & 63)
        value >>= 6
    out.append(value)
    return bytes(out)
