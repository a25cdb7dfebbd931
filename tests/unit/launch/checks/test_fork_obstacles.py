"""Whether this process may be forked, and who is to blame where it may not."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import traceback
import types
from types import SimpleNamespace

import pytest
import torch

from notebook_accel import devices
from notebook_accel.launch.checks import cuda_use, fork_obstacles

PRELUDE = "import torch, threading\nfrom notebook_accel.launch.checks.fork_obstacles import reasons\n"


def _in_fresh_python(code: str, prelude: str = PRELUDE, **environment: str) -> str:
    import os

    environ = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | environment
    done = subprocess.run(
        [sys.executable, "-c", prelude + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=240,
        env=environ,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_imports_and_python_threads_do_no_harm() -> None:
    code = """
    import numpy, sklearn.datasets, time
    numpy.ones((300, 300)) @ numpy.ones((300, 300))  # OpenBLAS starts its threads
    thread = threading.Thread(target=threading.Event().wait, daemon=True); thread.start()
    end = time.monotonic() + 40
    while reasons() and time.monotonic() < end:  # OpenBLAS's spin a while first: long, on a busy machine
        pass
    print(reasons())
    """
    assert _in_fresh_python(code) == "[]"


@pytest.mark.parametrize(
    "use",
    ["torch.randn(600, 600) @ torch.randn(600, 600)", "torch.randn(10**6).exp()", "torch.randn(10**6).sum()"],
)
def test_openmp_threads_are_seen(use: str) -> None:
    patient = (
        "from notebook_accel.launch.checks import fork_obstacles\nfork_obstacles._WAITING_SECONDS = 60.0"
    )
    assert "OpenMP" in _in_fresh_python(f"{use}\n{patient}\nprint(*reasons())", OMP_NUM_THREADS="4")
    assert _in_fresh_python(f"{use}\nprint(*reasons())", OMP_NUM_THREADS="1") == ""


def test_an_initialised_device_is_named_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    # a machine without the device: what torch would say there is imitated, the rest is real
    monkeypatch.setattr(devices, "list_initialized", lambda: ["cuda"])
    monkeypatch.setattr(fork_obstacles.cuda_use, "first_use", fork_obstacles.cuda_use.FirstUse())
    exec(
        compile("\n\nnotice()  # model.cuda()", "/tmp/ipykernel_12/34.py", "exec"),
        {"notice": fork_obstacles.cuda_use.first_use},
    )
    (reason,) = (r for r in fork_obstacles.reasons() if "CUDA" in r.what)
    assert str(reason).startswith("CUDA was initialised, first by a cell, line 3")


def test_an_import_is_the_cause() -> None:
    frames = [
        traceback.FrameSummary("/site/ipykernel/kernelapp.py", 10, "start", lookup_line=False),
        traceback.FrameSummary(
            "/tmp/ipykernel_1/2.py", 2, "<module>", lookup_line=False, line="import bad_library"
        ),
        traceback.FrameSummary("<frozen importlib._bootstrap>", 5, "_find_and_load", lookup_line=False),
        traceback.FrameSummary(
            "/site/bad_library/__init__.py", 7, "<module>", lookup_line=False, line="setup()"
        ),
        traceback.FrameSummary(
            "/site/bad_library/core.py", 9, "setup", lookup_line=False, line="torch.cuda.init()"
        ),
    ]
    text = fork_obstacles.describe_first_use(frames)
    assert text == "the import of bad_library in a cell, line 2 (import bad_library)"
    assert fork_obstacles.describe_first_use(None) == ""


def test_torch_calls_what_watches_when_cuda_is_initialised() -> None:
    code = """
    import notebook_accel
    from notebook_accel.launch.checks import cuda_use
    notebook_accel.notebook_launcher
    queued = [call for call, _ in torch.cuda._queued_calls]
    print(queued.count(cuda_use.first_use), torch.cuda.is_initialized())
    """
    assert _in_fresh_python(code) == "1 False"


def test_what_watches_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch may be half imported, hidden, or another's; and what reads the lines of a stack may be anybody's."""

    def fail(*args: object) -> None:
        raise RuntimeError("no CUDA here")

    half = types.ModuleType("torch")
    broken = types.ModuleType("torch")
    broken.cuda = SimpleNamespace(is_initialized=fail)  # type: ignore[attr-defined]
    other = types.ModuleType("torch")
    other.cuda = SimpleNamespace(  # type: ignore[attr-defined]
        is_initialized=lambda: False, _queued_calls=[], _lazy_call=fail
    )
    for module in (half, broken, other, None):
        monkeypatch.setitem(sys.modules, "torch", module)
        cuda_use.record()
    watch = cuda_use.FirstUse()
    loader = SimpleNamespace(get_source=fail)
    exec(compile("watch()", "made/up.py", "exec"), {"watch": watch, "__name__": "up", "__loader__": loader})


def test_a_launch_watches_where_torch_came_after_the_launcher() -> None:
    code = """
    from notebook_accel.launch.checks import cuda_use
    from notebook_accel.launchers import notebook_launcher
    import torch
    before = [call for call, _ in torch.cuda._queued_calls]
    notebook_launcher(int, num_processes=1)
    queued = [call for call, _ in torch.cuda._queued_calls]
    print(before.count(cuda_use.first_use), queued.count(cuda_use.first_use))
    """
    assert _in_fresh_python(code, prelude="").splitlines()[-1] == "0 1"


def test_open_device_files_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_obstacles.os, "listdir", lambda path: ["3"])
    monkeypatch.setattr(fork_obstacles.os, "readlink", lambda path: "/dev/nvidia-uvm")
    assert fork_obstacles.find_open_devices() == [
        "CUDA was initialised by a library, or by counting devices, as torch.cuda.is_available() does"
    ]
    assert not torch.cuda.is_initialized()


class _EndedTask:
    """The folder of a thread that ends while it is looked at: its files open, and have nothing to read."""

    def __truediv__(self, name: str) -> _EndedTask:
        return self

    def read_text(self) -> str:
        raise ProcessLookupError(3, "No such process")


def test_a_thread_that_ends_meanwhile_forbids_no_fork() -> None:
    assert fork_obstacles._check_thread(_EndedTask(), []) == ""  # type: ignore[arg-type]
