"""Tests for saves that end in the middle: killed processes, a full disk, several ranks."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from notebook_accel import Accelerator, CheckpointError
from notebook_accel.checkpointing import background, folder, names
from tests.faults.places import require_own_mounts
from tests.structure.source import ROOT
from tests.unit.checkpointing import full_disk, full_disk_ranks
from tests.unit.checkpoints import Counter, make_loader, make_parts, small_files, step, values
from tests.unit.multiprocess import do_without_deepspeed, run_ranks


def crash(where: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.unit.checkpointing.crashing_saves", str(where), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_process_killed_at_any_instant_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    answer = crash(tmp_path, "random", "60")
    assert answer["deaths"] == 60 and answer["left"] == ["kept"]
    assert answer["generations"] > 5, "children died before they saved anything"


def test_a_process_may_die_before_any_change_to_a_folder(tmp_path: Path) -> None:
    answer = crash(tmp_path, "sweep")
    assert answer["deaths"] > 20 and answer["left"] == ["kept"]


def test_a_process_that_saves_a_model_may_die_before_any_change_to_a_folder(tmp_path: Path) -> None:
    answer = crash(tmp_path, "models")
    assert answer["deaths"] > 60 and answer["old"] > 40 and answer["new"] > 10


def test_two_processes_that_save_to_one_folder_leave_it_whole(tmp_path: Path) -> None:
    answer = crash(tmp_path, "savers", "20")
    assert answer["loads"] > 20 and answer["values"] > 2 and answer["left"] == ["kept"]


def test_two_processes_that_save_models_to_one_folder_leave_it_whole(tmp_path: Path) -> None:
    answer = crash(tmp_path, "models-savers", "20")
    assert answer["loads"] > 20 and answer["values"] > 2 and answer["left"] == ["model.safetensors"]


@pytest.mark.parametrize("limit", [100, 1000, 3000, 10000])
@pytest.mark.parametrize("safe", [True, False])
def test_a_full_disk(tmp_path: Path, clean_runtime: None, limit: int, safe: bool) -> None:
    accelerator = Accelerator(cpu=True)
    parts = accelerator.prepare(*make_parts())
    step(accelerator, *parts)
    where = accelerator.save_state(tmp_path / "kept")
    wanted = values(*parts)
    step(accelerator, *parts)
    with (
        small_files(limit),
        pytest.raises(CheckpointError, match="what was there before is untouched: rank 0"),
    ):
        accelerator.save_state(where, safe_serialization=safe)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    accelerator.load_state(where)
    assert values(*parts) == wanted


def run_on_small_disk(program: ModuleType, folder: Path, *arguments: str) -> dict[str, Any]:
    """Return what a program says that mounts a small disk at a folder."""
    command = [*require_own_mounts(), sys.executable, "-m", program.__name__, str(folder), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_a_full_small_disk(tmp_path: Path) -> None:
    answer = run_on_small_disk(full_disk, tmp_path)
    assert answer["left"] == answer["then"] == ["kept"] and answer["same"]
    assert len(answer["errors"]) == 4
    for text in answer["errors"]:
        assert "No space left on device" in text and "what was there before is untouched" in text
    assert len(answer["named"]) == 4
    for name, text in answer["named"].items():
        assert text == f"[Errno 28] No space left on device: '{tmp_path / name}'"
    said = answer["sharded"]
    assert said.count("No space left on device") == said.count("was not written: rank") == 1, said
    assert "inline_container" not in said and said.count("CheckpointError") == 0


@pytest.mark.parametrize("kind", ["copies", "sharded"])
def test_ranks_that_save_in_the_background_on_a_full_small_disk(tmp_path: Path, kind: str) -> None:
    answer = run_on_small_disk(full_disk_ranks, tmp_path, kind)
    assert answer["left"] == []
    assert [len(told) for told in answer["told"]] == [2, 2]
    for text in [text for told in answer["told"] for text in told]:
        assert "was not written, what was there before is untouched: " in text
        assert "No space left on device" in text


def test_a_rank_that_finds_no_room_for_its_error_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    barriers = [background.FileErrorBarrier(tmp_path / "meeting", rank, 2) for rank in range(2)]
    write = Path.write_text

    def write_nothing(path: Path, *arguments: Any, **more: Any) -> int:
        if path.name.startswith("written-1"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, *arguments, **more)

    monkeypatch.setattr(Path, "write_text", write_nothing)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(barriers[0].exchange, "written", None)
        second = pool.submit(barriers[1].exchange, "written", "OSError: no room")
        assert first.result() == [None, "it failed, and the disk has no room for what it says"]
        assert second.result() == [None, "OSError: no room"]
        again = [pool.submit(barrier.exchange, "failed", f"of {n}") for n, barrier in enumerate(barriers)]
        assert [each.result() for each in again] == [["of 0", "of 1"]] * 2


def test_the_end_of_the_interpreter_waits_for_the_thread(tmp_path: Path) -> None:
    script = """
        import sys, torch
        from notebook_accel import Accelerator
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(torch.nn.Linear(4000, 4000))
        accelerator.save_state(sys.argv[1], async_save=True)
    """
    lines = "\n".join(line.strip() for line in script.splitlines())
    command = [sys.executable, "-c", lines, str(tmp_path / "kept")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "kept" / names.MANIFEST).exists()
    assert os.listdir(tmp_path) == ["kept"]


def build(project: Path | None = None) -> tuple[Accelerator, Any]:
    from notebook_accel.handlers import ProjectConfiguration

    config = None if project is None else ProjectConfiguration(project, None, True, 2)
    accelerator = Accelerator(cpu=True, project_config=config)
    parts = accelerator.prepare(*make_parts(norm=torch.nn.LayerNorm))
    accelerator.prepare(make_loader())
    accelerator.register_for_checkpointing(Counter(3))
    return accelerator, parts


def draws() -> list[float]:
    return [float(torch.rand(())), random.random()]


def rank_saves(where: Path, async_save: bool) -> Any:
    accelerator, parts = build()
    torch.manual_seed(accelerator.process_index)
    step(accelerator, *parts)
    accelerator.save_state(where, async_save=async_save)
    if async_save:
        accelerator.save_state(where, async_save=True)
    state = values(*parts)
    drawn = draws()
    step(accelerator, *parts)
    accelerator.load_state(where)
    assert values(*parts) == state
    assert draws() == drawn, (draws(), drawn, sorted(p.name for p in where.iterdir()))
    accelerator.end_training()
    return state, drawn, sorted(path.name for path in where.parent.iterdir())


def rank_loads(where: Path) -> Any:
    accelerator, parts = build()
    accelerator.load_state(where)
    return values(*parts), draws()


@pytest.mark.parametrize("async_save", [False, True])
def test_two_ranks_save_and_any_number_loads(tmp_path: Path, clean_runtime: None, async_save: bool) -> None:
    where = tmp_path / "kept"
    first, second = run_ranks(rank_saves, where, async_save)
    assert first[0] == second[0] and first[1] != second[1] and first[2] == ["kept"]
    assert {"random_states_0.pkl", "random_states_1.pkl"} <= {path.name for path in where.iterdir()}
    assert rank_loads(where) == first[:2]
    if async_save:
        return
    three = run_ranks(rank_loads, where, world_size=3)
    assert [loaded[0] for loaded in three] == [first[0]] * 3
    assert [loaded[1] for loaded in three[:2]] == [first[1], second[1]]
    assert three[2][1] not in (first[1], second[1])
    assert run_ranks(rank_loads, where, world_size=3)[2][1] == three[2][1]


def rank_saves_apart(where: Path) -> Any:
    accelerator, _ = build()
    own = where / str(accelerator.process_index)
    own.mkdir()
    with pytest.raises(CheckpointError) as caught:
        accelerator.save_state(own / "state")
    return str(caught.value), list(own.iterdir())


def test_ranks_that_save_to_folders_of_their_own_are_told(tmp_path: Path) -> None:
    for rank, (said, left) in enumerate(run_ranks(rank_saves_apart, tmp_path)):
        assert (
            f"checkpoint {tmp_path / str(rank) / 'state'} cannot be written: the ranks of a node save to one"
            in said
        )
        assert f"rank 1: it saves to {tmp_path / '1' / 'state'}, other ranks of its node do not" in said
        assert left == []


def rank_meets_accelerate(where: Path) -> Any:
    import accelerate

    do_without_deepspeed()
    accelerator, parts = build()
    step(accelerator, *parts)
    accelerator.save_state(where / "ours")
    other = accelerate.Accelerator(cpu=True)
    assert other.num_processes == 2
    others, counter = other.prepare(*make_parts(3, torch.nn.LayerNorm)), Counter()
    other.register_for_checkpointing(counter)
    other.load_state(where / "ours")
    assert values(*others) == values(*parts) and counter.value == 3
    step(other, *others)
    other.save_state(where / "theirs")
    other.wait_for_everyone()
    accelerator.load_state(where / "theirs")
    assert values(*others) == values(*parts)
    return values(*parts)


def test_two_ranks_exchange_checkpoints_with_accelerate(tmp_path: Path, clean_runtime: None) -> None:
    answers = run_ranks(rank_meets_accelerate, tmp_path)
    assert rank_loads(tmp_path / "theirs")[0] == answers[0]


def rank_fails(project: Path, async_save: bool) -> list[str]:
    from notebook_accel.checkpointing import write

    accelerator, parts = build(project)
    accelerator.save_state()
    state = values(*parts)
    step(accelerator, *parts)
    whole = write.File.write

    def full(self: write.File, where: Path) -> None:
        raise OSError(28, "No space left on device")

    errors = []
    for failing in range(2):
        if accelerator.process_index == failing:
            write.File.write = full  # type: ignore[method-assign]
        try:
            accelerator.save_state(async_save=async_save)
            accelerator._wait_for_writer()
        except CheckpointError as error:
            errors.append(str(error))
        write.File.write = whole  # type: ignore[method-assign]
        accelerator.wait_for_everyone()
        assert os.listdir(project / "checkpoints") == ["checkpoint_0"]
    accelerator.load_state()
    assert values(*parts) == state
    return errors


@pytest.mark.parametrize("async_save", [False, True])
def test_the_error_of_one_rank_is_raised_on_all(tmp_path: Path, async_save: bool) -> None:
    first, second = run_ranks(rank_fails, tmp_path, async_save)
    assert first == second and len(first) == 2
    for rank, text in enumerate(first):
        assert f"rank {rank}: OSError: [Errno 28] No space left on device" in text
        assert "what was there before is untouched" in text


def rank_sees_its_own_disk(where: Path, num_nodes: int) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    if num_nodes == 2:
        os.environ |= {
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": str(rank),
            "GROUP_WORLD_SIZE": "2",
        }
    accelerator, parts = build()
    own = where / str(rank) / "kept"
    if rank == 1 and num_nodes == 2:  # left by a process that was killed
        left = folder.Staging(target=own, token=folder.make_token()).path
        left.mkdir(parents=True)
        (left / "random_states_0.pkl").write_bytes(b"old")
    with pytest.raises(CheckpointError) as caught:
        accelerator.save_state(own, async_save=True)
    left = sorted(path.name for path in own.parent.iterdir()) if own.parent.exists() else []
    state = values(*parts)
    if num_nodes == 2:
        accelerator.project_configuration.save_on_each_node = True
        accelerator.save_state(own)
        step(accelerator, *parts)
        accelerator.load_state(own)
    accelerator.end_training()
    return {
        "error": str(caught.value),
        "left": left,
        "same": values(*parts) == state,
        "then": sorted(path.name for path in own.iterdir()) if own.exists() else [],
    }


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_disk_that_ranks_do_not_share_is_refused_in_the_background(tmp_path: Path, num_nodes: int) -> None:
    first, second = run_ranks(rank_sees_its_own_disk, tmp_path, num_nodes)
    for rank, answer in enumerate((first, second)):
        assert answer["error"].startswith(f"checkpoint {tmp_path / str(rank) / 'kept'} cannot be written")
        assert "rank 1 does not see" in answer["error"] and "async_save=False" in answer["error"]
        assert answer["same"]
    assert first["left"] == [] and len(second["left"]) == num_nodes - 1
    if num_nodes == 2:
        assert names.MANIFEST in first["then"] and "random_states_0.pkl" in first["then"]
        assert names.MANIFEST in second["then"] and "random_states_0.pkl" not in second["then"]


def rank_cannot_load(where: Path) -> tuple[str, bool]:
    accelerator, parts = build()
    accelerator.save_state(where)
    if accelerator.process_index == 1:
        (where / "random_states_1.pkl").write_bytes(b"x" * (where / "random_states_1.pkl").stat().st_size)
    accelerator.wait_for_everyone()
    step(accelerator, *parts)
    before = values(*parts)
    with pytest.raises(CheckpointError) as caught:
        accelerator.load_state(where)
    return str(caught.value), values(*parts) == before


def test_no_rank_loads_where_one_cannot(tmp_path: Path) -> None:
    (first, same), (second, also_same) = run_ranks(rank_cannot_load, tmp_path / "kept")
    assert same and also_same
    assert (
        first.startswith("rank 1 cannot load")
        and "random_states_1.pkl" in first
        and "random_states_1.pkl" in second
    )


def test_a_folder_left_between_two_renames_comes_back(tmp_path: Path, clean_runtime: None) -> None:
    accelerator, _ = build()
    where = accelerator.save_state(tmp_path / "kept")
    os.rename(where, folder.Staging(target=where, token=folder.make_token()).previous)
    accelerator.load_state(where)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def rank_hook_fails(where: Path) -> str:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.save_state(where)

    def fails(models: Any, folder: str) -> None:
        if accelerator.process_index == 1:
            raise KeyError("what the hook looks for")

    accelerator.register_load_state_pre_hook(fails)
    with pytest.raises((CheckpointError, KeyError)) as caught:
        accelerator.load_state(where)
    return f"{caught.type.__name__}: {caught.value}"


def test_a_hook_that_fails_on_one_rank_is_heard_of_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(rank_hook_fails, tmp_path / "kept", timeout=120)
    assert second == "KeyError: 'what the hook looks for'"
    assert first.startswith("CheckpointError: rank 1 cannot load") and "what the hook looks for" in first
