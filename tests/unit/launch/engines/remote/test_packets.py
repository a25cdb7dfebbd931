"""Packets and beats on a pipe."""

from __future__ import annotations

import random

import pytest

from notebook_accel.launch.engines.remote import packets


def test_bytes_arrive_however_they_are_cut() -> None:
    chance = random.Random(1)
    content = [chance.randbytes(size) for size in (0, 1, 4091, 4092, 4093, 20_000, 3)]
    cut = list(packets.cut([memoryview(part) for part in content], 4096))
    assert all(len(packet) <= 4096 for packet in cut)
    stream = packets.BEAT + b"".join(packet + packets.BEAT for packet in cut)
    reader, found = packets.PacketReader(), b""
    while stream:
        size = chance.randrange(1, 3000)
        found, stream = found + reader.feed(stream[:size]), stream[size:]
    assert found == b"".join(content)
    assert reader.beats == len(cut) + 1


def test_what_is_no_packet_is_told() -> None:
    with pytest.raises(ConnectionError, match="no packet"):
        packets.PacketReader().feed(b"Traceback (most recent call last)")


def test_only_time_that_was_watched_counts_as_silence() -> None:
    quiet = packets.Quiet(0.0)
    assert not quiet.look(100.0, heard=False), "the process stood still, and what came is not read yet"
    assert not any(quiet.look(100.0 + second, heard=False) for second in range(1, 10))
    assert quiet.look(110.5, heard=False)
    assert not quiet.look(110.6, heard=True)
