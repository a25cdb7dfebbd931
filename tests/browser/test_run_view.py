"""The view of a run in a real JupyterLab and a real Notebook 7."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.browser.conftest import APPS, KERNELS, Lab
from tests.browser.test_config_form import CONTRAST

pytestmark = [pytest.mark.browser, pytest.mark.notebook, pytest.mark.timeout(300)]

TRAIN = """
import os, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
from notebook_accel import Accelerator, notebook_launcher, print_metrics, runs

def train(steps, fails=None, asks=True):
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    data = TensorDataset(torch.rand(6400, 4), torch.rand(6400, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 32))
    print("pid", os.getpid(), flush=True)
    step = 0
    while step < steps:
        for x, y in loader:
            loss = (model(x) - y).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0:
                print_metrics(step=step, loss=loss.detach(), rate=10 ** (-step / 100))
                print("a warning of step", step, file=sys.stderr)
            time.sleep(0.02)
            if fails and os.path.exists(fails) and accelerator.process_index == 1:
                raise ValueError("the <b>first</b> bad batch")
            if step == steps or (asks and accelerator.should_stop):  # the ranks count alike, their clocks do not
                return step
    return step
"""
PATIENT = """
from notebook_accel.launch.supervise import stop_agreement

stop_agreement._ANSWER_SECONDS = 60.0  # a rank of a busy machine may stand still
"""
LAUNCH = "run = notebook_launcher(train, args=({}, {!r}), num_processes=2, block=False)"
SLEEP = """
import os, time
from notebook_accel import notebook_launcher

def sleep():
    print("pid", os.getpid(), flush=True)
    time.sleep(600)
"""
SAVE = "async () => { await window.jupyterapp.commands.execute('docmanager:save'); }"
VIEW = ".accel-run"
# The page that is saved, which comes a moment after the same page in the widgets.
STATIC = ".accel-run-static:not(.jupyter-widgets *)"
# Finds and reads in one go: an update of the view replaces what is in it.
CONTRAST_OF = f"""part => {{
    const node = document.querySelector(part);
    return node && ({CONTRAST})(node);
}}"""


def contrast(page: Any, part: str) -> float:
    """Wait for the first node of this kind and return its contrast."""
    seen: float = page.wait_for_function(CONTRAST_OF, arg=part).json_value()
    return seen


def wait_for_change(page: Any, part: str) -> None:
    """Wait until the first node of this kind, which an update replaces, reads otherwise."""
    page.locator(part).first.wait_for()
    seen = page.locator(part).first.inner_text()
    page.wait_for_function(
        "([part, seen]) => (document.querySelector(part) || {}).innerText !== seen",
        arg=[part, seen],
    )  # fmt: skip


def workers(page: Any) -> list[psutil.Process]:
    """The workers of the run in view, by the ids that they printed."""
    found = []
    for rank in (0, 1):
        page.get_by_role("tab", name=f"rank {rank}").click()
        pane = page.locator(".accel-run-lines:visible", has_text=re.compile(r"pid \d+"))
        pane.wait_for()
        found += re.findall(r"pid (\d+)", pane.inner_text())
    assert len(found) == 2
    return [psutil.Process(int(pid)) for pid in found]


def stop(page: Any) -> float:
    """Click Stop; return the seconds until the workers are gone and the final view is there."""
    alive = workers(page)
    assert all(worker.is_running() for worker in alive)
    page.get_by_role("button", name="Stop").click()
    clicked = time.monotonic()
    page.locator(STATIC).get_by_role("status").filter(has_text="stopped").wait_for()
    seconds = time.monotonic() - clicked
    assert not any(worker.is_running() for worker in alive)
    assert page.get_by_role("button", name="Stop").count() == 0
    return seconds


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("app", APPS)
def test_a_run_from_launch_to_saved_page(
    lab: Lab, page: Any, run_cells: Callable[..., str], app: str, kernel: str
) -> None:
    tell = "import ipykernel; print('ipykernel', ipykernel.__version__)"
    launch = "run = notebook_launcher(train, args=(40_000, None, False), num_processes=2, block=False)"
    name = run_cells([TRAIN + tell, launch], app=app, kernel=lab.kernel(kernel))
    page.get_by_text(f"ipykernel {kernel}", exact=True).wait_for()
    page.locator(f"{VIEW} svg[aria-label*=loss]").wait_for()
    wait_for_change(page, f"{VIEW} td:nth-of-type(2)")
    assert stop(page) < 60, "what the workers do would go on for longer"
    wide = "node => node.offsetWidth / parseFloat(getComputedStyle(node).fontSize)"
    assert page.locator(STATIC).evaluate(wide) <= 64, "lines of a length that can be read"
    picture = page.locator(f"{STATIC} img[alt*=loss]")
    assert picture.evaluate("node => node.naturalWidth") > 100
    page.evaluate(SAVE)
    saved = json.loads((lab.root / name).read_text())
    (output,) = saved["cells"][1]["outputs"]
    assert output["data"].keys() == {"text/html", "text/plain"}
    assert "accel-run-static" in "".join(output["data"]["text/html"])
    assert "stopped" in "".join(output["data"]["text/plain"])


def test_it_lives_in_every_copy(page: Any, run_cells: Callable[..., str]) -> None:
    run_cells([TRAIN + PATIENT, LAUNCH.format(40_000, None), "run.show()"])
    live = page.locator(VIEW)
    live.nth(1).wait_for()
    assert live.count() == 2, "the cell's view, and the one of show()"
    first = live.first
    first.get_by_role("progressbar", name=re.compile(r"epoch \d+")).wait_for()
    first.locator("svg[aria-label*=loss]").wait_for()
    wait_for_change(page, f"{VIEW} td:nth-of-type(2)")
    first.get_by_role("status").filter(has_text="running").wait_for()
    logarithmic = first.locator("svg[aria-label*=logarithmic]")
    assert logarithmic.count() == 0
    page.get_by_label("log scale").first.check()
    logarithmic.wait_for()
    page.get_by_label("all ranks").first.check()
    first.get_by_role("progressbar", name="rank 0").wait_for()
    first.get_by_role("progressbar", name="rank 1").wait_for()
    page.get_by_role("button", name="Stop").first.focus()
    page.keyboard.press("Enter")
    page.locator(STATIC).nth(1).wait_for()
    text = page.locator(STATIC).first.inner_text()
    assert "✓ done" in text, "workers that ask whether to stop return"


LEGEND = "div:has(> span:text-is('ranks'))"
MANY = """
import os, time
from notebook_accel import notebook_launcher, print_metrics

def log(name):
    rank = int(os.environ["RANK"])
    for step in range(60):
        print_metrics(step=step, loss=(1 + rank / 4) / (step + 1), speed=100 + rank)
    while not os.path.exists(name):
        time.sleep(0.05)

run = notebook_launcher(log, ("ended",), num_processes=10, block=False)
"""
ALL_LOGGED = "while len(run.rank_metrics()) < 600:\n    time.sleep(0.05)"


def read_legend(view: Any) -> str:
    return " ".join(view.locator(LEGEND).inner_text().split())


@pytest.mark.parametrize("theme", ["Light", "Dark"])
def test_ranks_are_laid_over_each_other(
    lab: Lab, page: Any, run_cells: Callable[..., str], theme: str, tmp_path: Path
) -> None:
    name = run_cells([MANY, ALL_LOGGED], theme=theme)
    live = page.locator(VIEW)
    live.locator("svg[aria-label*='step 59']").wait_for()
    assert live.locator(LEGEND).count() == 0, "only where it is asked for"
    page.get_by_label("a line for each rank").check()
    live.locator("svg[aria-label^='each rank']").wait_for()
    assert read_legend(live) == "ranks ━ 0 ━ 1 ━ 2 ━ 3 ━ 4 ━ 5 ━ 6 ━ 7 of 10"
    for part in ("svg text", "div:has(> span + span)"):
        assert contrast(page, f"{VIEW} {part}") >= 4, part
    page.screenshot(path=tmp_path / f"ranks {theme}.png")
    page.get_by_label("ranks", exact=True).select_option(["1", "9"])
    live.locator("svg title", has_text="rank 9").first.wait_for(state="attached")
    live.locator(LEGEND).filter(has_text="9").wait_for()
    assert read_legend(live) == "ranks ━ 1 ━ 9 of 10"
    said = live.locator("svg title").all_text_contents()
    assert "step 0\nrank 1 1.25\nrank 9 3.25" in said
    page.screenshot(path=tmp_path / f"chosen {theme}.png")
    (lab.root / "ended").touch()
    final = page.locator(STATIC)
    final.get_by_text("metrics of each rank").click()
    picture = final.locator("img[alt='metrics of each rank']")
    picture.wait_for()
    assert picture.evaluate("node => node.naturalWidth") > 100
    assert read_legend(final) == "ranks ━ 1 ━ 9 of 10", "as it was chosen"
    picture.scroll_into_view_if_needed()
    page.screenshot(path=tmp_path / f"saved ranks {theme}.png")
    page.evaluate(SAVE)
    assert "metrics of each rank" in (lab.root / name).read_text()
    (lab.root / "ended").unlink()


def test_stop_ends_a_blocking_run(page: Any, run_cells: Callable[..., str]) -> None:
    run_cells([SLEEP], more=["notebook_launcher(sleep, num_processes=2)"])
    assert stop(page) < 60, "what the workers do would go on for longer"
    page.locator(".jp-OutputArea-output", has_text="RunStoppedError").first.wait_for()


@pytest.mark.parametrize("app", APPS)
def test_a_reload_keeps_the_view(lab: Lab, page: Any, run_cells: Callable[..., str], app: str) -> None:
    name = run_cells([TRAIN, LAUNCH.format(40_000, None)], app=app)
    page.locator(f"{VIEW} svg[aria-label*=loss]").wait_for()
    page.evaluate(SAVE)
    lab.open(page, name, app)
    wait_for_change(page, f"{VIEW} td:nth-of-type(2)")
    page.get_by_role("button", name="Stop").click()
    final = page.locator(
        f"{VIEW} .accel-run-static"
    )  # in the widgets: a reloaded page takes no updates of displays
    final.get_by_role("status").filter(has_text="stopped").wait_for()


@pytest.mark.timeout(300)  # three pages of a notebook and two conversions
def test_a_saved_view_can_be_read_the_next_day(
    lab: Lab, page: Any, run_cells: Callable[..., str], tmp_path: Path
) -> None:
    name = run_cells([TRAIN, LAUNCH.format(80, None)])
    page.locator(STATIC).wait_for()
    page.evaluate(SAVE)
    lab.end_sessions()
    saved = lab.root / name
    text = saved.read_text()
    assert "accel-run-static" in text and "widget-view" not in text and "<script" not in text
    book = json.loads(text)
    book["cells"][0]["source"] = "# from a colleague"  # whose signature is not ours: the page is sanitized
    (lab.root / f"copy_{name}").write_text(json.dumps(book))
    for opened, trusted in ((name, True), (f"copy_{name}", False)):
        lab.open(page, opened)
        page.get_by_text("✓ done").first.wait_for()
        picture = page.locator("img[alt*=loss]" if trusted else ".jp-OutputArea-output img").first
        picture.wait_for()
        assert picture.evaluate("node => node.naturalWidth") > 100
        assert page.get_by_text("Error displaying widget").count() == 0
        assert (page.locator(f"{STATIC} [role=status]").count() == 1) == trusted
        page.screenshot(path=tmp_path / f"{opened}.png")
    check_web_page(page, saved, "dark", tmp_path)


def check_web_page(page: Any, saved: Path, theme: str, folder: Path) -> None:
    """Make a web page of a saved notebook and look at it."""
    export = [sys.executable, "-m", "nbconvert", "--to", "html", f"--theme={theme}"]
    subprocess.run([*export, "--output-dir", folder, saved], check=True, capture_output=True, timeout=240)
    page.route(re.compile("^https?://"), lambda route: route.abort())
    page.goto((folder / f"{saved.stem}.html").as_uri())
    page.get_by_role("status").filter(has_text="✓ done").wait_for()
    assert page.locator("img[alt*=loss]").first.evaluate("node => node.naturalWidth") > 100
    for part in ("[role=status]", "td", "pre span", "summary", "details pre"):
        assert contrast(page, f"{STATIC} {part}") >= 4, f"{part}, {theme}"
    assert page.locator(".jp-OutputArea script").count() == 0
    assert "accel" not in "".join(page.locator("script").all_inner_texts())
    page.screenshot(path=folder / f"page {theme}.png")


@pytest.mark.parametrize("theme", ["Light", "Dark"])
def test_it_can_be_read(page: Any, run_cells: Callable[..., str], theme: str, tmp_path: Path) -> None:
    fails = tmp_path / "fails"
    run_cells([TRAIN, LAUNCH.format(40_000, str(fails))], theme=theme)
    page.locator(f"{VIEW} svg[aria-label*=loss]").wait_for()
    page.screenshot(path=tmp_path / f"running {theme}.png")
    for part in ("svg text", "td"):
        assert contrast(page, f"{VIEW} {part}") >= 4, part
    fails.touch()
    page.locator(STATIC).wait_for()
    page.screenshot(path=tmp_path / f"failed {theme}.png")
    for part in ("[role=alert]", "[role=status]", "td", "pre span", "summary", "details pre"):
        assert contrast(page, f"{STATIC} {part}") >= 4, part
