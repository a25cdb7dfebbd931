"""Hosts: each job has fresh processes, and none is left."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.libraries import hosts, sides
from tests.notebooks.kernel import wait_until

sides.skip_without("accelerate")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="hosts need Linux"),
]


def look() -> None:
    """Write what this process is, and change what the next is not to see."""
    import accelerate
    from torch import distributed

    state = accelerate.PartialState(cpu=True)
    found = {
        "library": accelerate.__file__,
        "world": [state.process_index, state.num_processes],
        "backend": distributed.get_backend() if distributed.is_initialized() else None,
        "changed": [hasattr(accelerate, "mark"), "NA_MARK" in os.environ],
        "folder": os.getcwd(),
        "said": os.environ["NA_SAID"],
        "loaded": "xml.dom.minidom" in sys.modules,
    }
    accelerate.mark = True  # type: ignore[attr-defined]
    os.environ["NA_MARK"] = "1"
    print("looked")
    Path(f"{state.process_index}.json").write_text(json.dumps(found))
    state.wait_for_everyone()  # a process that leaves at once breaks connections that the others still make
    state.destroy_process_group()


def fail_in_one() -> None:
    """Fail in the second process; the first waits for ever."""
    if os.environ["RANK"] == "1":
        raise ValueError("this one fails")
    signal.pause()


def wait() -> None:
    """Wait for ever, with a child that does too."""
    if child := os.fork():
        Path("pids").write_text(f"{os.getpid()} {child}")
    signal.pause()


def kill_host() -> None:
    """Kill the host from the first process; the parent of the second may be another by then."""
    if os.environ["RANK"] == "0":
        os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


def is_alive(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def make_job(folder: Path, name: str, number: int = 1, **more: Any) -> hosts.Job:
    folder.mkdir(exist_ok=True)
    variables = {"NA_SAID": folder.name}
    return hosts.Job(
        function=f"{__name__}:{name}", number=number, folder=str(folder), variables=variables, **more
    )


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


@pytest.mark.parametrize("side", hosts.SIDES)
def test_each_job_has_fresh_processes(side: str, tmp_path: Path) -> None:
    with hosts.open_hosts(tmp_path) as opened:
        for number, name in ((2, "first"), (1, "second")):
            folder = tmp_path / name
            opened[side].run(make_job(folder, "look", number, libraries=["xml.dom.minidom"]))
            found = read(folder)
            assert [one["world"] for one in found] == [[rank, number] for rank in range(number)]
            for one in found:
                assert ("notebook_accel" in one["library"]) is (side == "ours")
                assert one["backend"] == ("gloo" if number == 2 else None)
                assert one["changed"] == [False, False] and one["loaded"]
                assert (one["folder"], one["said"]) == (str(folder), name)
            assert (folder / "output.txt").read_text().count("looked") == number


def test_after_a_failure_a_host_starts_anew(tmp_path: Path) -> None:
    before = psutil.Process().children(recursive=True)
    with hosts.open_hosts(tmp_path) as opened:
        host = opened["ours"]
        for name, words in (("fail_in_one", "this one fails"), ("kill_host", "the host has ended")):
            with pytest.raises(AssertionError, match=words):
                host.run(make_job(tmp_path / name, name, 2))
            assert host.pid is None and psutil.Process().children(recursive=True) == before
            host.run(make_job(tmp_path / f"after {name}", "look"))


def test_a_job_past_its_limit_is_killed(tmp_path: Path) -> None:
    with hosts.open_hosts(tmp_path) as opened:
        host = opened["ours"]
        with pytest.raises(AssertionError, match="'is_late': True"):
            host.run(make_job(tmp_path, "wait", libraries=[__name__], seconds=40))
        pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
        assert len(pids) == 2 and wait_until(lambda: not any(map(is_alive, pids)), 60)


def test_a_host_refuses_the_wrong_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = hosts.make_environment(tmp_path)
    monkeypatch.setattr(hosts, "make_environment", lambda folder, side: variables)
    with (
        hosts.open_hosts(tmp_path) as opened,
        pytest.raises(AssertionError, match="has Accelerate from"),
    ):
        opened["ours"].run(make_job(tmp_path, "look"))


def test_a_host_refuses_to_fork_with_threads(tmp_path: Path) -> None:
    with hosts.open_hosts(tmp_path) as opened, pytest.raises(AssertionError, match="cannot be forked"):
        opened["ours"].run(make_job(tmp_path, "look", libraries=[f"{__name__}:thread"]))


def __getattr__(name: str) -> Any:
    """Start a thread when somebody asks for it."""
    if name != "thread":
        raise AttributeError(name)
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return name
