"""Where a process cannot take another's descriptors (Windows), output travels as events; that way works anywhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.notebooks.kernel import Kernel

pytestmark = [pytest.mark.notebook, pytest.mark.once]
METHODS = ["fork", "spawn"]


@pytest.fixture(autouse=True)
def by_events(kernel: Kernel) -> Iterator[None]:
    kernel.run("from notebook_accel.launch.supervise import starting; starting.OUTPUT_BY_PIPES = False").ok()
    yield
    kernel.run("starting.OUTPUT_BY_PIPES = True").ok()


@pytest.mark.parametrize("method", METHODS)
def test_lines_of_every_origin(kernel: Kernel, method: str) -> None:
    cell = kernel.run(
        f"""
        import subprocess, ctypes
        def speak():
            rank = os.environ["RANK"]
            print("printed", rank)
            print("to stderr", rank, file=sys.stderr)
            subprocess.run(["echo", "child", rank])
            ctypes.CDLL(None).printf(f"from C {{rank}}\\n".encode())
            print("no newline at the end", rank, end="")
        notebook_launcher(speak, num_processes=2, start_method="{method}")
        """
    ).ok()
    for rank in "01":
        for text in ("printed", "child"):
            assert f"[{rank}] {text} {rank}" in cell.lines
        own = [line for line in cell.lines if line.startswith(f"[{rank}] ")]
        # C writes at the end of the process, perhaps behind an unfinished line
        for text in ("from C", "no newline at the end"):
            assert any(f"{text} {rank}" in line for line in own)
        assert f"[{rank}] to stderr {rank}\n" in cell.stderr


@pytest.mark.parametrize("method", METHODS)
def test_a_flood_is_whole_and_displays_keep_their_place(kernel: Kernel, method: str) -> None:
    cell = kernel.run(
        f"""
        from IPython.display import HTML, display
        def flood():
            for i in range(20_000):
                print("line", i)
                if i % 5_000 == 4_999:
                    display(HTML(f"<b>{{i}}</b>"))
            return i
        notebook_launcher(flood, num_processes=2, start_method="{method}", output="first")
        """
    ).ok()
    shown: list[str] = []
    for output in cell.outputs:
        if output["type"] == "stream":
            shown += output["content"]["text"].splitlines()
        elif output["type"] == "display_data":
            shown.append(output["content"]["data"]["text/html"])
    expected = [[f"line {i}"] + [f"<b>{i}</b>"] * (i % 5_000 == 4_999) for i in range(20_000)]
    assert [text for text in shown if not text.startswith("Launching")] == [
        text for texts in expected for text in texts
    ]


@pytest.mark.parametrize("method", METHODS)
def test_errors_and_exits_bring_their_last_words(kernel: Kernel, method: str) -> None:
    cell = kernel.run(
        f"""
        def fail():
            print("last words")
            raise ZeroDivisionError("the cause") if os.environ["RANK"] == "1" else SystemExit(3)
        notebook_launcher(fail, num_processes=2, start_method="{method}")
        """
    )
    assert cell.error is not None and cell.error[0] in ("ZeroDivisionError", "WorkerExitedError")
    assert "last words" in cell.stdout
    assert not kernel.children()
