"""Tests for checksums of bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from notebook_accel.checkpointing import checksums, rawio


def test_all_ways_to_compute_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [0, 1, 4095, 4096, 4097, 1032192, 1032192 + 5, (4 << 20) + 4100, (5 << 20) + 3]
    made = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    path = tmp_path / "bytes"
    path.write_bytes(b"x" + b"".join(bytes(rawio.memory(part)) for part in made))
    starts = [1 + sum(sizes[:index]) for index in range(len(sizes))]
    expected = [checksums.compute(rawio.memory(part)) for part in made]
    assert len(set(expected)) == len(sizes)
    assert checksums.compute_at(path, list(zip(starts, sizes, strict=True))) == expected
    for few in (1 << 30, 0):
        monkeypatch.setattr(rawio, "_FEW", few)
        fresh = [torch.zeros_like(part) for part in made]
        assert checksums.read_into(path, list(zip(starts, fresh, strict=True))) == expected
        assert all(map(torch.equal, fresh, made))
    with pytest.raises(OSError, match="ends before its byte"):
        checksums.compute_at(path, [(0, sum(sizes) + 2)])
    pages = made[-1][: 8 * 4096].reshape(8, 4096)
    orders = (pages, pages.flip(0).contiguous())
    assert len({checksums.compute(rawio.memory(order)) for order in orders}) == 2


@pytest.mark.parametrize("size", [0, 1, 4096, 1 << 20, (1 << 20) + 1, (5 << 20) + 4099])
def test_blocks_while_writing_and_of_the_file_agree(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    blocks = checksums.Blocks()
    values = torch.randint(0, 256, (size,), dtype=torch.uint8)
    with rawio.create(path, on_block=blocks.add) as file:
        file.write(rawio.memory(values))
    assert checksums.describe(path) == blocks.text
    assert checksums.find_damage(path, blocks.text) is None
    if size < 2:
        return
    content = bytearray(path.read_bytes())
    content[size // 2] ^= 1
    path.write_bytes(content)
    block = size // 2 // checksums.BLOCK * checksums.BLOCK
    assert checksums.find_damage(path, blocks.text) == (block, min(block + checksums.BLOCK, size))
    assert checksums.find_damage(path, blocks.text, [(size // 2, 1)]) is not None
    others = [(0, block), (block + checksums.BLOCK, size - block - checksums.BLOCK)]
    assert checksums.find_damage(path, blocks.text, [span for span in others if span[1] > 0]) is None
    assert checksums.find_damage(path, blocks.text + "0" * 8) == (0, size)
