"""Everything that workers write, display or draw comes into the cell that launched them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.notebooks.kernel import METHODS, METHODS_ONCE, Kernel

pytestmark = pytest.mark.notebook


@pytest.mark.parametrize("method", METHODS)
def test_lines_of_every_origin_are_marked_by_rank(kernel: Kernel, method: str) -> None:
    cell = kernel.run(
        f"""
        import logging, subprocess, ctypes
        logging.basicConfig(level=logging.INFO, force=True)
        def speak():
            rank = os.environ["RANK"]
            print("printed", rank)
            print("to stderr", rank, file=sys.stderr)
            logging.info("logged %s", rank)
            subprocess.run(["echo", "child", rank])
            ctypes.CDLL(None).printf(f"from C {{rank}}\\n".encode())
            print("é" * 3000 + rank)
            print("no newline at the end", rank, end="")
        notebook_launcher(speak, num_processes=2, start_method="{method}")
        """
    ).ok()
    for rank in "01":
        assert f"[{rank}] printed {rank}" in cell.lines
        assert f"[{rank}] child {rank}" in cell.lines
        assert f"[{rank}] {'é' * 3000}{rank}" in cell.lines
        own = [line for line in cell.lines if line.startswith(f"[{rank}] ")]
        # C writes at the end of the process, perhaps behind an unfinished line
        for text in ("from C", "no newline at the end"):
            assert any(f"{text} {rank}" in line for line in own)
        assert f"[{rank}] to stderr {rank}\n" in cell.stderr
        assert f"[{rank}] INFO:root:logged {rank}\n" in cell.stderr
    assert all(line.startswith("[") for line in cell.lines)


def test_output_arrives_while_the_run_goes_on(kernel: Kernel) -> None:
    seen: list[bool] = []
    kernel.run("import pathlib; flag = pathlib.Path('flag'); flag.unlink(missing_ok=True)").ok()
    cell = kernel.run(
        """
        def wait_for_reader():
            print("go")
            while not flag.exists():
                time.sleep(0.01)
            return "read while running"
        notebook_launcher(wait_for_reader, num_processes=2, output="first")
        """,
        during=lambda: seen.append(_touch(kernel)),
    )
    assert cell.value == "'read while running'"


def _touch(kernel: Kernel) -> bool:
    from pathlib import Path

    import psutil

    Path(psutil.Process(kernel.pid).cwd(), "flag").touch()
    return True


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("'first'", ["rank 0"]),
        ("'none'", []),
        ("[1]", ["rank 1"]),
        ("[0, 2]", ["[0] rank 0", "[2] rank 2"]),
        ("'all'", ["[0] rank 0", "[1] rank 1", "[2] rank 2"]),
    ],
)
def test_output_chooses_ranks(kernel: Kernel, output: str, expected: list[str]) -> None:
    cell = kernel.run(
        f"notebook_launcher(lambda: print('rank', os.environ['RANK']), num_processes=3, output={output})"
    ).ok()
    assert sorted(cell.lines) == expected


def test_prefix_template(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        notebook_launcher(lambda: print('x'), num_processes=2,
                          log_line_prefix_template='<${role_name} ${local_rank} ${rank}> ')
        """
    ).ok()
    assert sorted(cell.lines) == ["<worker 0 0> x", "<worker 1 1> x"]


@pytest.mark.parametrize("method", METHODS_ONCE)
def test_displays_and_figures_keep_their_place(kernel: Kernel, method: str) -> None:
    pytest.importorskip("matplotlib")
    kernel.run("%matplotlib inline\nimport matplotlib.pyplot as plt").ok()
    cell = kernel.run(
        f"""
        from IPython.display import display, HTML, update_display
        def show():
            from notebook_accel.stream import capture
            capture._READ_SECONDS = 60.0  # the kernel may stand still on a busy machine
            print("before")
            display(HTML("<b>bold</b>"), display_id="mine")
            print("between")
            plt.plot([1, 2]); plt.show()
            print("after")
            update_display(HTML("<i>changed</i>"), display_id="mine")
            plt.figure()
            plt.plot([2, 1])
        notebook_launcher(show, num_processes=2, output="first", start_method="{method}")
        """
    ).ok()
    kinds = [
        line
        for output in cell.outputs
        for line in (
            output["content"]["text"].splitlines() if output["type"] == "stream" else [output["type"]]
        )
        if not line.startswith("Launching")
    ]
    assert kinds[:5] == ["before", "display_data", "between", "display_data", "after"]
    assert "<i>changed</i>" in cell.displays[0]["text/html"]
    figures = [data for data in cell.displays if "image/png" in data]
    assert len(figures) == 2  # the second was left open, as at the end of a cell


@pytest.mark.parametrize("module", ["tqdm", "tqdm.auto", "tqdm.notebook"])
@pytest.mark.parametrize("method", METHODS_ONCE)
def test_tqdm_is_one_bar(kernel: Kernel, module: str, method: str) -> None:
    cell = kernel.run(
        f"""
        from {module} import tqdm
        def bar():
            for _ in tqdm(range(50), desc="steps"):
                time.sleep(0.005)
            for _ in tqdm(range(3), desc="gone", leave=False):
                pass
        notebook_launcher(bar, num_processes=2, start_method="{method}")
        """
    ).ok()
    texts = [data["text/plain"] for data in cell.displays]
    assert len(texts) == 2
    assert texts[0].startswith("steps: 100%") and "50/50" in texts[0]
    assert texts[1] == ""
    assert cell.stderr == ""
    assert not cell.lines


@pytest.mark.parametrize("method", METHODS_ONCE)
def test_rich_and_widgets_are_text_in_a_worker(kernel: Kernel, method: str) -> None:
    """No front end knows the widgets of a worker: they would stand there as errors, or end the function."""
    cell = kernel.run(
        f"""
        def train():
            from IPython.display import display
            from ipywidgets import IntProgress, Output
            from rich.progress import track
            for _ in track(range(3), description="training"): pass
            with Output(): print("inside")
            bar = IntProgress(value=30); bar.value = 40
            display(bar)
            return type(get_ipython()).__name__
        notebook_launcher(train, num_processes=2, start_method="{method}")
        """
    ).ok()
    assert cell.value == "'WorkerShell'" and not cell.stderr
    assert [sum("training" in line and "100%" in line for line in cell.lines)] == [2], cell.lines
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in cell.lines]  # Rich hides the cursor
    assert sorted(line for line in lines if "inside" in line) == ["[0] inside", "[1] inside"]
    shown = [data for data in cell.displays if "IntProgress" in data.get("text/plain", "")]
    assert shown == [{"text/plain": "IntProgress(value=40)"}] * 2
    assert not [output for output in cell.outputs if output["type"].startswith("comm_")]


def test_widgets_of_the_kernel_are_quiet_in_a_fork(kernel: Kernel) -> None:
    kernel.run("import ipywidgets, rich\nmine, console = ipywidgets.IntProgress(), rich.get_console()").ok()
    cell = kernel.run(
        """
        def train():
            from rich.progress import Progress
            mine.value = 7
            with Progress(console=console) as progress:
                progress.advance(progress.add_task("epochs", total=1))
            return mine.value
        notebook_launcher(train, num_processes=2, start_method="fork")
        """
    ).ok()
    assert cell.value == "7" and not cell.stderr
    assert len([line for line in cell.lines if "epochs" in line and "100%" in line]) == 2, cell.lines
    assert not any("text/html" in data for data in cell.displays)
    assert kernel.run("mine.value").value == "0"


def test_a_bar_of_another_library_is_no_wall_of_lines(kernel: Kernel) -> None:
    cell = kernel.run(
        r"""
        def spin():
            for i in range(100):
                sys.stdout.write(f"\rstep {i}")
                sys.stdout.flush()
            print()
        notebook_launcher(spin, num_processes=2)
        """
    ).ok()
    assert sorted(cell.lines) == ["[0] step 99", "[1] step 99"]


def test_many_lines_arrive_whole(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        def flood():
            rank = os.environ["RANK"]
            for i in range(20_000):
                print(rank, i, "x" * 50)
        notebook_launcher(flood, num_processes=2)
        """
    ).ok()
    for rank in "01":
        mine = [line for line in cell.lines if line.startswith(f"[{rank}]")]
        assert mine == [f"[{rank}] {rank} {i} {'x' * 50}" for i in range(20_000)]


def test_nothing_comes_after_the_cell(kernel: Kernel) -> None:
    kernel.run(
        """
        def last():
            print("y" * 100_000)
            os.write(1, b"last words\\n")
        notebook_launcher(last, num_processes=2)
        """
    ).ok()
    assert kernel.late_output(0.5) == []


@pytest.mark.parametrize("method", METHODS_ONCE)
def test_errors_that_ipython_shows_are_output_of_the_rank(kernel: Kernel, method: str) -> None:
    """A shell shows errors of `__repr__` itself, and the value is returned."""
    cell = kernel.run(
        f"""
        class Odd:
            def __repr__(self): raise ValueError("from repr")
            def _repr_html_(self): raise TypeError("from html")
        def show():
            from IPython.display import display
            display(Odd())
            shell = get_ipython()
            try: 1 / 0
            except ZeroDivisionError: shell.showtraceback()
            shell.run_cell("undefined_name")
            shell.run_cell("1 +")
            shell.run_cell("six = 6; six")
            return 4 + shell.run_cell("six").result
        notebook_launcher(show, num_processes=2, start_method={method!r})
        """
    ).ok()
    told = re.sub(r"\x1b\[[0-9;]*m", "", cell.stderr)
    errors = ["ValueError: from repr", "TypeError: from html", "ZeroDivisionError: division by zero"]
    errors += ["NameError: name 'undefined_name' is not defined", "SyntaxError: invalid syntax"]
    for error in errors:
        assert [told.count(f"[{rank}] {error}") for rank in (0, 1)] == [1, 1], told
    of_others = [] if method == "fork" else ["IPython/core"]  # old kernels show their own frames
    for strange in ("AttributeError", "Unexpected", "stream/displays", *of_others):
        assert strange not in told + cell.stdout
    assert cell.value == "10"
    assert [shown["text/plain"] for shown in cell.displays if "text/plain" in shown].count("6") == 4


@pytest.mark.parametrize("module", ["pdb", "IPython.core.debugger"])
def test_a_debugger_says_why_it_cannot_ask(kernel: Kernel, module: str) -> None:
    """It would quit, which a notebook does not show as an error."""
    cell = kernel.run(
        f"""
        def look():
            from {module} import set_trace; set_trace()
            return 5
        notebook_launcher(look, num_processes=2)
        """
    )
    assert cell.error is not None and cell.error[0] == "RuntimeError"
    assert "cannot ask for input, as a debugger does" in cell.error[1]
    assert "return 5" in cell.traceback


def test_input_says_why_it_cannot_ask(kernel: Kernel) -> None:
    cell = kernel.run("notebook_launcher(lambda: input('name? '), num_processes=2)")
    assert cell.error is not None
    assert cell.error[0] == "EOFError"
    assert "name? " in cell.error[1]


def test_data_loader_workers_may_print_and_show_bars(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        from torch.utils.data import DataLoader, Dataset
        from tqdm import tqdm
        class Loud(Dataset):
            def __len__(self): return 4
            def __getitem__(self, i):
                for _ in tqdm(range(2), desc=f"item {i}"): pass
                print("item", i)
                return i
        def load():
            return sum(int(x.sum()) for x in DataLoader(Loud(), num_workers=2))
        notebook_launcher(load, num_processes=2, returns="all")
        """
    ).ok()
    assert cell.value == "[6, 6]"
    assert sorted(cell.lines) == sorted(f"[{r}] item {i}" for r in range(2) for i in range(4))


@pytest.mark.parametrize("ends", ["stop", "failure", "hang"])
def test_a_line_that_has_not_ended_is_kept_of_a_worker_that_is_ended(
    kernel: Kernel, ends: str, tmp_path: Path
) -> None:
    shown = kernel.run(
        f"""
        def begin(ends):
            print("epoch 1 ...", end=" ")
            print("warned", end="", file=sys.stderr)
            if ends == "failure" and os.environ["RANK"] == "1":
                while not os.path.exists("{tmp_path}/go"): time.sleep(0.01)
                raise ValueError("bad batch")
            time.sleep(60)
        hang = dict(hang_timeout=2, on_hang="raise") if "{ends}" == "hang" else {{}}
        run = notebook_launcher(begin, ("{ends}",), num_processes=2, block=False, **hang)
        while len(run.record.unfinished) < 4: time.sleep(0.02)  # of each stream, while it stands
        if "{ends}" == "stop": run.stop()
        if "{ends}" == "failure": open("{tmp_path}/go", "w").close()
        run.wait(60), run.status, [sorted(run.lines(rank)) for rank in (0, 1)]
        """,
        timeout=120,
    ).ok()
    has_ended, status, of_ranks = eval(shown.value)
    assert (has_ended, status) == (True, {"stop": "stopped", "failure": "failed", "hang": "failed"}[ends])
    assert all({"epoch 1 ... ", "warned"} <= set(lines) for lines in of_ranks), of_ranks
