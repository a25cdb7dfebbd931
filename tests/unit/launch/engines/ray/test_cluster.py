"""How this process connects to Ray."""

from __future__ import annotations

import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import pytest

from notebook_accel.launch.engines.ray import cluster


@pytest.mark.parametrize(
    ("address", "folder", "by_user", "expected"),
    [
        ("local", "/tmp/" + "long" * 25, None, "/tmp/ray"),
        ("local", "/tmp/" + "long" * 25, "/by/user", None),
        ("local", "/tmp", None, None),
        ("10.0.0.1:6379", "/tmp/" + "long" * 25, None, None),
    ],
)
def test_a_ray_that_starts_here_has_room_for_its_sockets(
    address: str, folder: str, by_user: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=lambda **options: asked.append(options)))  # type: ignore[arg-type]
    monkeypatch.setattr(tempfile, "tempdir", folder)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    if by_user is not None:
        monkeypatch.setenv("RAY_TMPDIR", by_user)
    cluster._init(address)
    (options,) = asked
    assert options.get("_temp_dir") == expected


def test_a_folder_that_the_user_named_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=lambda **options: None))  # type: ignore[arg-type]
    monkeypatch.setenv("RAY_TMPDIR", "/r")
    monkeypatch.setattr(cluster.leftovers, "find_folder", lambda length: pytest.fail("it was looked for"))
    cluster._init("local")


@pytest.mark.parametrize(
    ("says", "tries"),
    [
        ("Proxy failed to Connect to backend! Check logs", 2),
        ("psutil.ZombieProcess: PID still exists but it's a zombie (pid=7)", 2),
        ("RuntimeError: Starting Ray client server failed. See ray_client_server_23000.err", 2),
        ("connection refused", 1),
    ],
)
def test_what_passes_is_tried_again(says: str, tries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def init(*, address: str, **options: Any) -> None:
        asked.append(address)
        raise ConnectionAbortedError(says)

    ray: Any = SimpleNamespace(init=init, shutdown=lambda: None)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(ConnectionAbortedError):
        cluster._init("ray://there:10001")
    assert len(asked) == tries
