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


def test_a_long_variable_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_REQUIRE_CUDA", "cuda>=13.0 " * 200)
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "0")
    lines = environment.as_text(environment.collect()).splitlines()
    assert "  - NVIDIA_VISIBLE_DEVICES=0" in lines
    (line,) = (line for line in lines if "REQUIRE" in line)
    assert len(line) < 500 and " ... " in line and line.endswith("(2,200 characters)")
