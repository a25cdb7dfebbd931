"""Tests for the folder of a checkpoint: its name, links to it, other files in it, and how many are kept."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest

from notebook_accel import Accelerator, CheckpointError
from notebook_accel.checkpointing import folder, manifest, names, write
from notebook_accel.handlers import ProjectConfiguration
from tests.unit.checkpoints import Counter, step, trained, values

pytestmark = pytest.mark.usefixtures("clean_runtime")


@pytest.mark.parametrize("can_exchange", [True, False])
def test_other_files_in_the_folder_stay(
    tmp_path: Path, can_exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        monkeypatch.setattr(folder, "_exchange", lambda one, other: False)
    accelerator = Accelerator(cpu=True)
    trained(accelerator)
    where = tmp_path / "run"
    (where / "logs").mkdir(parents=True)
    (where / "logs" / "events").write_text("kept")
    (where / "optimizer_1.bin").write_text("of an older run with two optimizers")
    with open(where / "open.log", "w") as log:
        accelerator.save_state(where)
        log.write("written after the save")
    assert (where / "logs" / "events").read_text() == "kept"
    assert (where / "open.log").read_text() == "written after the save"
    assert not (where / "optimizer_1.bin").exists()
    accelerator.load_state(where)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_automatic_names_and_a_limit(tmp_path: Path) -> None:
    config = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=config)
    assert accelerator.project_dir == accelerator.logging_dir == str(tmp_path)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    assert accelerator.load_state("latest") is False  # the first start of what may be started again
    with pytest.raises(ValueError, match="checkpoints holds no checkpoint to load"):
        accelerator.load_state()
    for value in range(12):
        counter.value = value
        assert accelerator.save_iteration == value
        accelerator.save_state()
    assert [n for n, _ in names.checkpoints(tmp_path / "checkpoints")] == [10, 11]
    for choice in (None, "latest"):
        counter.value = 0
        assert accelerator.load_state(choice) is True
        assert counter.value == 11
    again = Accelerator(cpu=True, project_config=ProjectConfiguration(tmp_path, None, True))
    again.register_for_checkpointing(counter)
    again.project_configuration.iteration = 11
    with pytest.raises(ValueError, match="checkpoint_11 exists"):
        again.save_state()
    again.load_state()
    assert again.save_state().name == "checkpoint_12"


def test_the_limit_removes_nothing_before_the_new_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(cpu=True, project_config=config)
    trained(accelerator)
    accelerator.save_state()

    def full(self: write.File, where: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(write.File, "write", full)
        with pytest.raises(CheckpointError, match=r"untouched: rank 0: OSError: .*No space left"):
            accelerator.save_state()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_0"]
    accelerator.load_state()
    accelerator.save_state()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_1"]


@pytest.mark.parametrize("there", [True, False])
def test_a_link_leads_to_the_checkpoint(tmp_path: Path, there: bool) -> None:
    accelerator = Accelerator(cpu=True)
    parts = trained(accelerator)
    real, link = tmp_path / "real", tmp_path / "link"
    link.symlink_to(real)
    if there:
        real.mkdir()
        (real / "notes.txt").write_text("not ours")
    for _ in range(2):
        assert accelerator.save_state(link) == real
    wanted = values(*parts)
    step(accelerator, *parts)
    accelerator.load_state(link)
    assert values(*parts) == wanted
    assert link.is_symlink() and sorted(tmp_path.iterdir()) == [link, real]
    assert (real / "notes.txt").exists() == there


def test_the_limit_removes_links_and_not_what_they_lead_to(tmp_path: Path) -> None:
    config = ProjectConfiguration(tmp_path / "run", automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(cpu=True, project_config=config)
    trained(accelerator)
    first = accelerator.save_state()
    first.rename(tmp_path / "elsewhere")
    first.symlink_to(tmp_path / "elsewhere")
    second = accelerator.save_state()
    assert list(second.parent.iterdir()) == [second]
    assert (tmp_path / "elsewhere" / names.MANIFEST).exists()


def test_what_ended_processes_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    trained(accelerator)
    say = "from notebook_accel.checkpointing import folder; print(folder.make_token())"
    ended = subprocess.check_output([sys.executable, "-c", say], text=True).strip()
    elsewhere, old = (f"{random}-1-1-12345678" for random in ("12345678", "87654321"))
    target = tmp_path / "kept[1]"
    for token in (folder.make_token(), ended, elsewhere, old):
        for path in (target, tmp_path / "kept1"):
            folder.Staging(target=path, token=token).path.mkdir()
            folder.Staging(target=path, token=token).barrier_files.mkdir()
    for path in tmp_path.glob(f"*{old}"):
        os.utime(path, (time.time() - 90_000,) * 2)
    before = {path.name for path in tmp_path.iterdir()}
    accelerator.save_state(target)
    removed = before - {path.name for path in tmp_path.iterdir()}
    wanted = {f"{target.name}.{kind}-{token}" for kind in ("saving", "meeting") for token in (ended, old)}
    assert removed == wanted


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda staging: os.truncate(staging / names.OPTIMIZER, 9), "optimizer.bin has 9 bytes, though"),
        (lambda staging: (staging / names.SAFE_MODEL).unlink(), "model.safetensors is missing, though"),
        (shutil.rmtree, "is missing"),
    ],
)
def test_a_file_that_is_not_what_was_written_stops_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], said: str
) -> None:
    accelerator = Accelerator(cpu=True)
    parts = trained(accelerator)
    where = accelerator.save_state(tmp_path / "kept")
    wanted = values(*parts)
    step(accelerator, *parts)
    note = manifest.note

    def damage(staging: Path, rank: int, found: Any) -> None:
        note(staging, rank, found)
        change(staging)

    monkeypatch.setattr(manifest, "note", damage)
    for in_background in (False, True):
        with pytest.raises(CheckpointError, match=f"what was there before is untouched: .*{said}"):
            accelerator.save_state(where, async_save=in_background)
            accelerator.end_training()
        assert os.listdir(tmp_path) == ["kept"]
    accelerator.load_state(where)
    assert values(*parts) == wanted


def test_two_runs_that_choose_the_same_number_keep_both_informed(tmp_path: Path) -> None:
    config = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True)
    ours, other = (Accelerator(cpu=True, project_config=copy.deepcopy(config)) for _ in range(2))
    counters = Counter(1), Counter(2)
    for accelerator, counter in zip((ours, other), counters, strict=True):
        accelerator.register_for_checkpointing(counter)
    ours.register_save_state_pre_hook(lambda *arguments: other.save_state())
    with pytest.raises(
        CheckpointError, match=r"another run has saved .*checkpoint_0 meanwhile: give each run"
    ):
        ours.save_state()
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_0"]
    other.load_state(tmp_path / "checkpoints" / "checkpoint_0")
    assert counters[1].value == 2


def test_the_limit_counts_and_removes_checkpoints_alone(tmp_path: Path) -> None:
    config = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=config)
    trained(accelerator)
    parent = tmp_path / "checkpoints"
    for name, file in (("checkpoint_5", "notes.txt"), ("checkpoint_90", "model.safetensors")):
        (parent / name).mkdir(parents=True)
        (parent / name / file).write_text("a user's")
    theirs = accelerate.Accelerator(cpu=True)
    theirs.save_state(str(parent / "checkpoint_1"))
    assert [path.name for _, path in names.checkpoints(parent)] == ["checkpoint_1"]
    accelerator.project_configuration.iteration = 2
    saved = [accelerator.save_state().name for _ in range(2)]
    assert sorted(os.listdir(parent)) == sorted(["checkpoint_5", "checkpoint_90", *saved])
    accelerator.load_state()
    assert accelerator.save_iteration == 4
