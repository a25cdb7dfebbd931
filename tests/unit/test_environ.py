"""The environment of this process, as a whole."""

from __future__ import annotations

import os

import pytest

from notebook_accel import environ


def test_what_differs_is_all_that_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("OTHER", "1")
    monkeypatch.setenv("TOO_MANY", "1")
    monkeypatch.delenv("ADDED", raising=False)
    before = environ.snapshot()
    wanted = {**before, "OTHER": "2", "ADDED": "3"}
    del wanted["TOO_MANY"]
    changes = environ.find_changes(wanted)
    assert set(changes.removed) == {"TOO_MANY"} and changes.set == {"OTHER": "2", "ADDED": "3"}
    changes.make()
    assert dict(os.environ) == wanted
    assert environ.find_changes(wanted) == environ.Changes(removed=set(), set={})
    environ.restore(before)
    assert dict(os.environ) == before
