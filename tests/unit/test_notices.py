"""Sentences of the package's own on stderr."""

from __future__ import annotations

import sys

import pytest

from notebook_accel.notices import tell


class Pieces:
    """A stream that keeps what each call wrote."""

    def __init__(self) -> None:
        self.written: list[str] = []

    def write(self, text: str) -> int:
        self.written.append(text)
        return len(text)


def test_other_threads_cannot_print_into_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = Pieces()
    monkeypatch.setattr(sys, "stderr", pieces)
    tell("the view is broken")
    assert pieces.written == ["notebook_accel: the view is broken\n"]


def test_a_program_without_a_console(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    tell("nobody reads this")
