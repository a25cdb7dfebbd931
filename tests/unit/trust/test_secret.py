"""Where a secret comes from, and what it protects."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path

import pytest

from notebook_accel.trust.proof import KEY_BYTES
from notebook_accel.trust.secret import FILE_VARIABLE, VARIABLE, Trust, find_secret

SECRET = "correct horse battery staple"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    path.chmod(0o600)
    return path


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VARIABLE, FILE_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def test_an_argument_a_file_and_variables(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_secret(None) is None
    assert find_secret(SECRET) == find_secret(file) == SECRET
    monkeypatch.setenv(VARIABLE, "of the variable itself")
    assert find_secret(None) == "of the variable itself"
    monkeypatch.setenv(FILE_VARIABLE, str(file))
    assert find_secret(None) == SECRET
    assert find_secret("of the argument itself") == "of the argument itself"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_others_may_read_is_refused(
    file: Path, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getegid", lambda: 12345)
    monkeypatch.setattr(os, "getgroups", lambda: [12345])
    file.chmod(mode)
    with pytest.raises(ValueError, match=rf"mode {mode:03o}\): chmod 600 ") as caught:
        find_secret(file)
    assert SECRET not in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_root_for_a_group_of_this_process(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So Kubernetes hands a secret to a container with an fsGroup."""
    os.chown(file, 0, 12345)
    file.chmod(0o440)
    with pytest.raises(ValueError, match="mode 440"):
        find_secret(file)
    monkeypatch.setattr(os, "getgroups", lambda: [12345])
    assert find_secret(file) == SECRET
    file.chmod(0o460)
    with pytest.raises(ValueError, match="mode 460"):
        find_secret(file)
    os.chown(file, 54321, -1)
    file.chmod(0o440)
    with pytest.raises(ValueError, match="mode 440"):
        find_secret(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(file, 12345, -1)
    with pytest.raises(ValueError, match="belongs to another user"):
        find_secret(file)


def test_what_is_no_secret_is_refused_without_showing_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="has 6 characters, at least 16 are needed") as caught:
        find_secret("hunter")
    assert "hunter" not in str(caught.value)
    file.write_bytes(b"\xff" * 40)
    with pytest.raises(ValueError, match="is no text"):
        find_secret(file)
    monkeypatch.setenv(FILE_VARIABLE, "/nowhere/at/all")
    with pytest.raises(ValueError, match=rf"^{FILE_VARIABLE}='/nowhere/at/all': the file cannot be read"):
        find_secret(None)


def test_a_secret_is_neither_shown_nor_pickled() -> None:
    trust = Trust(SECRET)
    assert SECRET not in f"{trust!r} {vars(trust)}"
    for leak in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match="not pickled"):
            leak(trust)


def test_what_connections_prove_needs_the_secret() -> None:
    keys = {Trust().key, Trust(SECRET).key, Trust(SECRET + "!").key}
    assert len(keys) == 3 and all(len(key) == KEY_BYTES for key in keys)
