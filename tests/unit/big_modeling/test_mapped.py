"""Tests for weights whose values are pages of a file that is damaged, cut off or written again meanwhile."""

from __future__ import annotations

import copy
import errno
import mmap
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from notebook_accel import CheckpointError, init_empty_weights, load_checkpoint_and_dispatch, utils
from notebook_accel.big_modeling import mapped, offload
from notebook_accel.checkpointing import weights
from notebook_accel.hooks.align import align_hook
from tests.unit.big_models import INPUT, Words, half, save, words
from tests.unit.multiprocess import run_ranks

WIDTH = 64  # weights of 64 KB: many pages


@torch.no_grad()
def said_by(action: Callable[..., Any], *arguments: Any) -> str:
    """Return what an action raised, nothing where it raised nothing."""
    try:
        action(*arguments)
    except CheckpointError as error:
        return str(error)
    return ""


class Calling(nn.Linear):
    """A layer that calls a function when it has used its weights."""

    after: Callable[[], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = super().forward(x)
        if self.after is not None:
            self.after()
        return result


def load(folder: Path, kind: str) -> tuple[nn.Module, Path]:
    """Return a model, half of it on the disk, and the file with the weights of one of its last layers."""
    source = save(words(width=WIDTH), folder, kind)
    with init_empty_weights():
        empty = Words(width=WIDTH).eval()
        empty.blocks[5].second = Calling(4 * WIDTH, WIDTH)
    model = load_checkpoint_and_dispatch(empty, source, half(), offload_folder=folder / "off")
    name = "off/blocks.5.second.weight.dat" if kind == "bin" else "model.safetensors"
    return model, folder / name


def cut(path: Path, left: int = 0) -> None:
    os.truncate(path, left)


def cut_once_fetched(layer: nn.Module, path: Path, left: int) -> None:
    """Cut the file when a thread has fetched the weights of the next layer."""
    hook: Any = align_hook(layer)
    job = hook.prefetcher._ahead[hook._need]
    job.run()
    cut(path, left)


def cut_files(folder: Path) -> dict[str, str]:
    """Return what a forward said after its file was cut: before it, between modules, and while a module computes."""
    said: dict[str, str] = {}
    for kind in ("safetensors", "bin"):
        for when in ("before", "between", "partial page", "meanwhile"):
            model, path = load(folder / kind / when, kind)
            said_by(model, INPUT)  # from now on weights are fetched ahead
            left = path.stat().st_size - 5 if when == "partial page" else 0
            last: Any = model.get_submodule("blocks.5")
            if when == "before":
                cut(path, left)
            elif when == "meanwhile":  # the pages are not used any more
                last.second.after = lambda path=path: cut(path)
            else:
                last.first.register_forward_hook(
                    lambda *args, path=path, left=left, layer=last.second: cut_once_fetched(layer, path, left)
                )
            said[f"{kind} {when}"] = f"{path.name}: {said_by(model, INPUT)}"
    return said


def test_a_file_that_is_cut_is_an_error_and_no_dead_process(tmp_path: Path) -> None:
    (said,) = run_ranks(cut_files, tmp_path, world_size=1)
    for what, text in said.items():
        name, _, message = text.partition(": ")
        assert name in message and "was written again after the model was loaded" in message, what


def flip_file(path: Path, place: int) -> None:
    found = path.stat()
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))  # a disk that fails tells no time


@pytest.mark.parametrize("aligned", [True, False])
def test_any_address_of_a_file_will_do_where_no_kernel_computes(tmp_path: Path, aligned: bool) -> None:
    path = tmp_path / "weights"
    values = torch.arange(1000, dtype=torch.float32)
    path.write_bytes(bytes(4) + values.numpy().tobytes() + bytes(1) + values.numpy().tobytes())
    places = {
        name: mapped.Place(path=path, offset=offset, shape=(1000,), dtype=torch.float32)
        for name, offset in {"first": 4, "second": 4005}.items()
    }
    found = mapped.read(places, aligned=aligned)
    assert all(torch.equal(tensor, values) for tensor in found.values())
    is_aligned = {name: tensor.data_ptr() % 64 == 0 for name, tensor in found.items()}
    assert is_aligned == {"first": aligned, "second": True}


@pytest.mark.parametrize("size", [1 << 18, 1 << 20])
def test_what_cannot_be_mapped_is_read(tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights"
    values = torch.arange(size, dtype=torch.float32)
    path.write_bytes(bytes(5) + values.numpy().tobytes())
    place = mapped.Place(path=path, offset=5, shape=(size // 2, 2), dtype=torch.float32)
    assert torch.equal(mapped.read({"x": place})["x"], values.view(-1, 2))
    refused: list[int] = []

    def refuse(fileno: int, *args: Any, **kwargs: Any) -> Any:
        if fileno >= 0:
            refused.append(fileno)
            raise OSError(errno.ENODEV, "no mappings here")
        return real(fileno, *args, **kwargs)

    real = mmap.mmap
    monkeypatch.setattr(mapped.mmap, "mmap", refuse)
    assert torch.equal(mapped.read({"x": place})["x"], values.view(-1, 2)) and refused
    cut(path, 5 + 4 * size - 1)
    with pytest.raises(CheckpointError, match="cannot be read for x"):
        mapped.read({"x": place})


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what its cache has")
def test_what_is_in_the_cache_is_known(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(size := 64 << 20))  # more than is read ahead of what is read
    first, second = (
        mapped.Place(path=path, offset=3 + start, shape=(4 << 20,), dtype=torch.uint8)
        for start in (0, size - (8 << 20))
    )
    empty = mapped.Place(path=path, offset=0, shape=(0,), dtype=torch.uint8)
    gone = mapped.Place(path=tmp_path / "gone", offset=0, shape=(1,), dtype=torch.uint8)
    assert mapped.is_cached([empty]) and not mapped.is_cached([gone])
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        deadline = time.monotonic() + 10
        # some pages may be in use for a moment
        while any(mapped.is_cached([one]) for one in (first, second)) and time.monotonic() < deadline:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if mapped.is_cached([first]):
            pytest.skip("this file system keeps its files in memory")
        assert not mapped.is_cached([second])
        os.pread(file.fileno(), first.nbytes + first.offset, 0)
    if not mapped.is_cached([first]):
        pytest.skip("this file system does not tell what is in the cache")
    assert not mapped.is_cached([first, second]) and mapped.is_cached([empty, first])


@pytest.mark.parametrize("beside", [False, True])
def test_copies_are_the_same_whoever_makes_them(tmp_path: Path, beside: bool) -> None:
    path = tmp_path / "weights"
    values = torch.arange(1 << 19, dtype=torch.float32)
    path.write_bytes(bytes(5) + values.numpy().tobytes())
    place = mapped.Place(path=path, offset=5, shape=(1 << 10, 1 << 9), dtype=torch.float32)
    assert torch.equal(mapped.read({"x": place}, beside=beside)["x"], values.view(1 << 10, 1 << 9))


def test_values_are_compared_when_they_are_read_first(tmp_path: Path) -> None:
    for kind in ("safetensors", "bin"):
        model, path = load(tmp_path / kind, kind)
        name, place = "blocks.5.second.weight", 100
        if kind == "safetensors":
            place += weights.read_header(path).entries[name].offset
        flip_file(path, place)
        message = said_by(model, INPUT)
        assert f"{path.name}: the values of '{name}' are not those that were written" in message
        flip_file(path, place)
        assert said_by(model, INPUT) == ""
        flip_file(path, place)
        assert said_by(model, INPUT) == ""  # compared once


def test_offloaded_folders_have_checksums_and_need_none(tmp_path: Path) -> None:
    state = {"a": torch.arange(6.0), "b": torch.zeros(0)}
    utils.offload_state_dict(tmp_path, state)
    index = offload.read_index(tmp_path)
    older = {name: {key: info[key] for key in ("dtype", "shape")} for name, info in index.items()}
    for given in (index, older):
        loader = utils.OffloadedWeightsLoader(save_folder=tmp_path, index=given)
        assert all(torch.equal(loader[name], value) for name, value in state.items())
    flip_file(tmp_path / "a.dat", 3)
    with pytest.raises(CheckpointError, match=r"a\.dat: the values of 'a' are not those"):
        utils.OffloadedWeightsLoader(save_folder=tmp_path)["a"]
    with pytest.raises(CheckpointError, match=r"a\.dat: the values of 'a' are not those"):
        utils.load_offloaded_weight(tmp_path / "a.dat", index["a"])
    assert utils.OffloadedWeightsLoader(save_folder=tmp_path, index=older)["a"][0] != 0


def test_memory_of_copies_is_used_again_once_nobody_has_it(tmp_path: Path) -> None:
    count, path = mapped._LARGE, tmp_path / "values"
    torch.arange(2 * count, dtype=torch.int32).numpy().tofile(path)
    rooms = mapped.Rooms()

    def read(first: int, length: int = count) -> torch.Tensor:
        place = mapped.Place(path=path, offset=4 * first, shape=(length,), dtype=torch.int32)
        return mapped.read({"values": place}, rooms=rooms)["values"]

    one = read(1)
    address, view = one.data_ptr(), one.detach()[5:]
    del one
    two = read(2)
    assert two.data_ptr() != address, "a view has it"
    assert view[0] == 6 and two[0] == 2
    del view
    assert read(3)[-1] == count + 2
    three = read(3)
    assert three.data_ptr() == address and three[0] == 3 and two[0] == 2
    assert copy.deepcopy(rooms)._known == []


def test_no_more_memory_is_kept_than_tensors_had_at_one_time(tmp_path: Path) -> None:
    rooms = mapped.Rooms()
    sizes = [(2 + number % 7) * mapped._LARGE for number in range(40)]
    alive: deque[torch.Tensor] = deque(maxlen=2)
    for size in sizes:
        place = mapped.Place(path=tmp_path, offset=0, shape=(size,), dtype=torch.uint8)
        alive.append(rooms.make(place))
        assert sum(len(pages) for pages, _ in rooms._known) <= rooms._most <= 3 * max(sizes)
    assert len({tensor.data_ptr() for tensor in alive}) == 2
