"""Which versions count as newer than what was tried."""

from __future__ import annotations

import pytest

from notebook_accel.takeover import tried


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("5.23.9", False),
        ("5.2", False),
        ("4.99", False),
        ("5.24.0.dev0", True),
        ("6.0", True),
        ("odd", False),
    ],
)
def test_a_later_minor_version_is_newer(
    version: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tried, "TRIED", {"transformers": "5.23"})
    assert tried.is_newer("transformers", version) is expected
