"""What Linux counts of processes that it killed for want of memory, and what control groups leave."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from notebook_accel.launch import memory_kills
from notebook_accel.launch.memory_kills import MemoryKills, find_free_memory


@pytest.fixture(autouse=True)
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the system would show control groups; this process is in one of each version."""
    own = tmp_path / "own"
    own.write_text("1:cpu:/elsewhere\n4:memory:/user/mine\n0::/user/mine\n")
    monkeypatch.setattr(memory_kills, "_GROUP", own)
    monkeypatch.setattr(memory_kills, "_GROUPS", tmp_path / "groups")
    return tmp_path / "groups"


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(text)


def test_what_the_system_has_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = tmp_path / "vmstat"
    monkeypatch.setattr(memory_kills, "_COUNTS", counts)
    assert MemoryKills().explain() == "", "nothing is known"
    counts.write_text("nr_free_pages 5\noom_kill 7\n")
    kills = MemoryKills()
    assert kills.explain().startswith("not by the system's out-of-memory killer")
    counts.write_text("nr_free_pages 5\noom_kill 8\n")
    assert "has killed a process of this machine: use less" in kills.explain()
    counts.write_text("nr_free_pages 5\noom_kill 9\n")
    assert "has killed 2 processes of this machine" in kills.explain()


@pytest.mark.parametrize(
    ("place", "events", "limit"),
    [
        ("user/mine", "events", "max"),
        ("", "events", "max"),
        ("memory/user/mine", "oom_control", "limit_in_bytes"),
        ("memory", "oom_control", "limit_in_bytes"),
    ],
)
def test_what_it_has_killed_in_a_control_group(groups: Path, place: str, events: str, limit: str) -> None:
    write(groups / place, **{events: "low 0\noom_kill 2\n", limit: "max\n"})
    kills = MemoryKills()
    assert kills.explain().startswith("not by")
    write(groups / place, **{events: "low 0\noom_kill 3\n"})
    assert "has killed a process of this control group: use less" in kills.explain()
    write(groups / place, **{limit: f"{1 << 62}\n"})
    assert "of this control group: use less" in kills.explain(), "no limit"
    write(groups / place, **{limit: f"{3 << 29}\n"})
    assert "of this control group, which may use 1.50 GiB of memory: use less" in kills.explain()


@pytest.mark.parametrize(
    ("inner", "outer", "free"),
    [
        ({"max": "5000\n", "current": "3000\n", "stat": "anon 7\ninactive_file 100\n"}, {}, 2100),
        ({"max": "max\n", "current": "3000\n"}, {}, None),
        ({"max": "5000\n", "current": "3000\n"}, {"max": "7000\n", "current": "6000\n"}, 1000),
        (None, {"max": "7000\n", "current": "6000\n"}, 1000),
        (
            {
                "limit_in_bytes": "5000",
                "usage_in_bytes": "3000",
                "stat": "inactive_file 1\ntotal_inactive_file 200\n",
            },
            {},
            2200,
        ),
    ],
)
def test_how_much_memory_is_free(
    groups: Path, inner: dict[str, str] | None, outer: dict[str, str], free: int | None
) -> None:
    """What the group leaves, where files count that the system drops first; else what the machine has."""
    place = "memory/user/mine" if inner and "limit_in_bytes" in inner else "user/mine"
    if inner is not None:
        write(groups / place, **inner)
    write(groups, **outer)
    found = find_free_memory()
    assert found == free if free else found > psutil.virtual_memory().available / 2
