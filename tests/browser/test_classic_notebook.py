"""The run view and the form with the notebook packages of Colab: ipywidgets 7 in the classic notebook, version 6."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import CHROMIUM, ROOT, Lab, list_classic_flags, open_page, serve_lab
from tests.browser.test_config_form import CONTRAST, FORM

pytestmark = [pytest.mark.browser, pytest.mark.notebook, pytest.mark.timeout(300)]

PYTHON = ROOT / ".venv-matrix" / "colab" / "bin" / "python"
READY = """() => {
    const notebook = window.Jupyter && Jupyter.notebook;
    return !!notebook && notebook._fully_loaded && !!notebook.kernel && notebook.kernel.is_connected()
        && !notebook.kernel_busy && !!notebook.kernel.comm_manager.targets['jupyter.widget'];
}"""
# The widget manager asks the kernel which widgets there are, and then draws the outputs of all cells anew. An output
# that comes meanwhile is lost. Shell messages are answered in order, so its question was answered before this one.
ASKED = "fallback to fetching individual model state"
ANSWERED = """() => new Promise(resolve => {
    Jupyter.notebook.kernel.comm_info('jupyter.widget', () => setTimeout(resolve, 100));
})"""
TRAIN = """
import os, sys, time
from notebook_accel import notebook_launcher, print_metrics

def train(name):
    rank = int(os.environ["RANK"])
    print("a warning", file=sys.stderr)
    for step in range(40):
        print_metrics(step=step, loss=(1 + rank) / (step + 1))
    print("hello from", rank, flush=True)
    while not os.path.exists(name):
        time.sleep(0.05)
    return "the end"

run = notebook_launcher(train, ("ended",), num_processes=2, block=False)
"""
VIEW = ".accel-run"
# widgetsnbextension 3.6.10 cannot make any `Output`; what is printed into one comes into the cell.
NOT_OURS = re.compile(r"_deserialize_state is not a function")
STATIC = ".accel-run-static:not(.jupyter-widgets *)"


@pytest.fixture(scope="module")
def classic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A server of the classic notebook; skips where its environment, playwright or Chromium is missing."""
    pytest.importorskip("playwright", reason="needs playwright: pip install 'notebook-accel[browser-test]'")
    if CHROMIUM is None:
        pytest.skip("needs Chromium on the PATH")
    if not PYTHON.exists():
        pytest.skip(f"needs the notebook packages of Colab in {PYTHON.parents[1]}: make test-colab")
    with serve_lab(tmp_path_factory.mktemp("classic"), str(PYTHON), list_classic_flags) as served:
        yield served


@pytest.fixture
def window(classic: Lab) -> Iterator[Any]:
    """A page for notebooks of the server."""
    with open_page(classic, NOT_OURS) as opened:
        yield opened


def run_cells(classic: Lab, page: Any, cells: list[str]) -> str:
    """Open a notebook with these cells, run them one after the other and return its name."""
    name = classic.write_notebook(cells)
    with page.expect_console_message(lambda message: ASKED in message.text):
        page.goto(f"{classic.url}/notebooks/{name}?token={classic.token}")
    page.wait_for_function(READY)
    page.evaluate(ANSWERED)
    for number in range(len(cells)):
        page.evaluate("number => Jupyter.notebook.execute_cells([number])", number)
        prompt = page.locator(".code_cell").nth(number).locator(".input_prompt")
        prompt.filter(has_text=f"[{number + 1}]:").wait_for()
    return name


def test_a_run_from_launch_to_saved_page(classic: Lab, window: Any, tmp_path: Path) -> None:
    name = run_cells(classic, window, [TRAIN])
    live = window.locator(VIEW)
    live.locator("svg[aria-label*='step 39']").wait_for()
    live.get_by_role("status").filter(has_text="running").wait_for()
    for rank in (1, 0):
        live.get_by_role("tab", name=f"rank {rank}", exact=True).click()
        pane = live.locator(".accel-run-lines:visible")
        pane.filter(has_text=f"hello from {rank}").wait_for()
    assert pane.evaluate("node => node.clientHeight > 100 && node.scrollHeight > node.clientHeight")
    for label, drawn in (("a line for each rank", "each rank"), ("log scale", "logarithmic")):
        live.get_by_label(label).check()
        live.locator(f"svg[aria-label*='{drawn}']").wait_for()
    for part in ("svg text", "td", ".accel-run-lines pre", ".lm-TabBar-tab, .p-TabBar-tab"):
        assert live.locator(part).first.evaluate(CONTRAST) >= 4, part
    window.screenshot(path=tmp_path / "running.png")
    (classic.root / "ended").touch()
    final = window.locator(STATIC)
    final.get_by_role("status").filter(has_text="done").wait_for()
    fold = final.get_by_text("metrics of each rank")
    assert fold.evaluate("node => getComputedStyle(node).display") == "list-item", (
        "with the sign that it opens"
    )
    fold.click()
    final.locator("img[alt='metrics of each rank']").wait_for()
    window.screenshot(path=tmp_path / "done.png")
    window.evaluate("() => Jupyter.notebook.save_notebook()")
    (output,) = json.loads((classic.root / name).read_text())["cells"][0]["outputs"]
    assert output["data"].keys() == {"text/html", "text/plain"}
    (classic.root / "ended").unlink()


def test_stop(classic: Lab, window: Any) -> None:
    run_cells(classic, window, [TRAIN])
    window.locator(VIEW).get_by_role("button", name="Stop").click()
    window.locator(STATIC).get_by_role("status").filter(has_text="stopped").wait_for()


def test_the_form(classic: Lab, window: Any, tmp_path: Path) -> None:
    run_cells(classic, window, ["%load_ext notebook_accel", "%accel_config"])
    form = window.locator(".accel-form")
    processes = form.get_by_label("num_processes")
    processes.fill("two")
    wrong = form.get_by_role("alert").get_by_text("num_processes 'two' is no whole number", exact=True)
    wrong.wait_for()
    window.screenshot(path=tmp_path / "wrong.png")
    for text in (wrong, form.get_by_text("Number of nodes.", exact=True), form.locator(".accel-preview pre")):
        assert text.evaluate(CONTRAST) >= 4, "as dark as its ground"
    assert processes.evaluate("node => node.offsetWidth") > 100
    processes.fill("2")
    form.locator(".accel-preview", has_text="num_processes: 2").wait_for()
    form.get_by_label("distributed_type").select_option("FSDP")
    form.get_by_label("fsdp_version").wait_for()
    window.screenshot(path=tmp_path / "form.png")


def test_a_launch_of_the_form_shows_its_output(classic: Lab, window: Any, tmp_path: Path) -> None:
    run_cells(classic, window, [FORM])
    form = window.locator(".accel-form")
    form.get_by_label("num_processes").fill("2")
    form.locator(".accel-preview", has_text="num_processes: 2").wait_for()
    form.get_by_role("button", name="Launch").click()
    for line in ("[0] hello from rank 0 of 2", "[1] hello from rank 1 of 2", "'the end'"):
        window.locator(".output").get_by_text(line).first.wait_for()
    window.screenshot(path=tmp_path / "launched.png")
