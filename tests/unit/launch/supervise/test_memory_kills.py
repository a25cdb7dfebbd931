"""Control groups of both versions, as the system shows them to processes outside and inside of containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from notebook_accel.launch.supervise.memory_kills import MemoryKills, find_group, find_limit

OLD = "34 25 0:29 {root} {at} rw - cgroup cgroup rw,memory"
NEW = "35 25 0:30 {root} {at} rw - cgroup2 cgroup2 rw"


def describe(folder: Path, groups: str, mount: str, root: str = "/") -> Path:
    """Write what the system says of a process, and return where."""
    own = folder / "own"
    own.mkdir()
    (own / "cgroup").write_text(groups)
    other = "22 1 254:0 / / rw - ext4 /dev/root rw\n"
    (own / "mountinfo").write_text(other + mount.format(root=root, at=folder / "groups") + "\n")
    return own


def make_group(folder: Path, path: str, **files: str) -> Path:
    group = folder / "groups" / path
    group.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (group / f"memory.{name}").write_text(text)
    return group


@pytest.mark.parametrize(
    ("groups", "mount", "root", "path", "file"),
    [
        ("0::/user/mine\n", NEW, "/", "user/mine", "events"),
        ("0::/\n", NEW, "/", "", "events"),
        ("1:cpu:/\n4:hugetlb,memory:/user/mine\n", OLD, "/", "user/mine", "oom_control"),
        ("4:memory:/docker/abc\n", OLD, "/docker/abc", "", "oom_control"),
        ("4:memory:/../elsewhere\n", OLD, "/docker/abc", "", "oom_control"),
    ],
)
def test_the_group_of_a_process(
    tmp_path: Path, groups: str, mount: str, root: str, path: str, file: str
) -> None:
    group = make_group(tmp_path, path, **{file: "low 0\noom_kill 2\n"})
    own = describe(tmp_path, groups, mount, root)
    assert find_group(own) == group
    kills = MemoryKills(own, tmp_path / "none")
    assert kills.explain().startswith("not by the system's out-of-memory killer")
    make_group(tmp_path, path, **{file: "low 0\noom_kill 3\n"})
    assert kills.explain().startswith(
        "the system's out-of-memory killer has killed a process of this control group: "
    )
    make_group(tmp_path, path, **{file: "low 0\noom_kill 4\n", "max": f"{3 << 29}\n"})
    assert "killed 2 processes of this control group, which may use 1.50 GiB" in kills.explain()


def test_a_system_without_groups(tmp_path: Path) -> None:
    whole = tmp_path / "vmstat"
    whole.write_text("nr_free_pages 5\noom_kill 7\n")
    kills = MemoryKills(tmp_path, whole)
    assert kills.explain().startswith("not by")
    whole.write_text("nr_free_pages 5\noom_kill 8\n")
    assert "has killed a process of this machine: use less" in kills.explain()
    assert MemoryKills(tmp_path, tmp_path / "none").explain() == "", "nothing is known"
    own = describe(tmp_path, "0::/user\n", NEW)  # a group that does not count
    assert find_group(own) is None


def test_a_mount_with_a_name_that_is_no_text_hides_nothing(tmp_path: Path) -> None:
    group = make_group(tmp_path, "mine", events="oom_kill 0\n")
    own = describe(tmp_path, "0::/mine\n", NEW)
    mounts = (own / "mountinfo").read_bytes()
    (own / "mountinfo").write_bytes(b"23 1 8:1 / /media/\xe4\r\x0c\xc2\x85 rw - vfat /dev/sdb1 rw\n" + mounts)
    assert find_group(own) == group


def test_the_least_of_the_limits_holds(tmp_path: Path) -> None:
    outer = make_group(tmp_path, "outer", limit_in_bytes="4096\n")
    inner = make_group(tmp_path, "outer/inner", limit_in_bytes="9223372036854771712\n")
    assert find_limit(inner) == find_limit(outer) == 4096
    assert find_limit(make_group(tmp_path, "other", max="max\n")) is None
