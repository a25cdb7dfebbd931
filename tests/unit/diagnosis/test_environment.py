"""Tests for what a bug report says about a machine."""

from __future__ import annotations

import pytest

from notebook_accel.diagnosis import environment


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:word@host/x", "https://(left out)host/x"),
        ("hf_abcdefghijkl and more", "(left out) and more"),
        ("/usr/lib:/lib", "/usr/lib:/lib"),
    ],
)
def test_texts_leave_out_secrets(text: str, shown: str) -> None:
    assert environment.leave_out_secrets(text) == shown
