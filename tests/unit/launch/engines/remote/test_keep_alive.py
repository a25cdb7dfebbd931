"""When the other end of a connection counts as lost."""

from __future__ import annotations

from notebook_accel.launch.engines.remote.keep_alive import KeepAlive


def test_only_time_that_was_watched_counts_as_silence() -> None:
    keep_alive = KeepAlive(0.0, 10.0)
    assert not keep_alive.is_lost(100.0, heard=False), (
        "the process stood still, and what came is not read yet"
    )
    assert not any(keep_alive.is_lost(100.0 + second, heard=False) for second in range(1, 10))
    assert keep_alive.is_lost(110.5, heard=False)
    assert not keep_alive.is_lost(110.6, heard=True)
