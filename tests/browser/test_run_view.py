"""The view of a run in a real JupyterLab."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.browser.conftest import READY, Lab
from tests.browser.test_config_form import CONTRAST

pytestmark = [pytest.mark.browser, pytest.mark.notebook]

TRAIN = """
import os, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
from notebook_accel import Accelerator, notebook_launcher, print_metrics, runs

def train(seconds, fails=False):
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    data = TensorDataset(torch.rand(6400, 4), torch.rand(6400, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 32))
    print("pid", os.getpid(), flush=True)
    end = time.time() + seconds
    step = 0
    while time.time() < end:
        for x, y in loader:
            loss = (model(x) - y).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0:
                print_metrics(step=step, loss=loss.detach(), accuracy=1 - loss.detach())
                print("a warning of step", step, file=sys.stderr)
            time.sleep(0.02)
            if fails and step == 60 and accelerator.process_index == 1:
                raise ValueError("the <b>first</b> bad batch")
            if time.time() > end or accelerator.should_stop:
                return step
    return step
"""
LAUNCH = "run = notebook_launcher(train, args=({}, {}), num_processes=2, block=False)"
SLEEP = """
import os, time
from notebook_accel import notebook_launcher

def sleep():
    print("pid", os.getpid(), flush=True)
    time.sleep(100)
"""
SAVE = "() => window.jupyterapp.commands.execute('docmanager:save')"
VIEW = ".accel-run"
STATIC = ".accel-run-static"


def wait_ready(page: Any) -> None:
    end = time.monotonic() + 60
    while not page.evaluate(READY):
        assert time.monotonic() < end, "the notebook did not get ready"
        page.wait_for_timeout(200)


def workers(page: Any) -> list[psutil.Process]:
    """The workers of the run in view, by the ids that they printed."""
    found = []
    for rank in (0, 1):
        page.get_by_role("tab", name=f"rank {rank}").click()
        pane = page.locator(".accel-run-lines:visible", has_text=re.compile(r"pid \d+"))
        pane.wait_for(timeout=30_000)
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


def test_it_lives_in_every_copy(page: Any, run_cells: Callable[..., None]) -> None:
    run_cells([TRAIN, LAUNCH.format(60, False), "run.show()"])
    live = page.locator(VIEW)
    live.nth(1).wait_for()
    assert live.count() == 2, "the cell's view, and the one of show()"
    first = live.first
    first.get_by_role("progressbar", name="epoch 1").wait_for(timeout=30_000)
    first.locator("svg[aria-label*=loss]").wait_for(timeout=30_000)
    step = first.locator("td").nth(1)
    seen = step.inner_text()
    page.wait_for_timeout(1500)
    assert step.inner_text() != seen, "the table goes on"
    assert "running" in first.get_by_role("status").inner_text()
    before = first.locator("svg").inner_html()
    page.get_by_label("log scale").first.check()
    page.wait_for_timeout(1500)
    assert first.locator("svg").inner_html() != before
    page.get_by_label("all ranks").first.check()
    first.get_by_role("progressbar", name="rank 0").wait_for()
    first.get_by_role("progressbar", name="rank 1").wait_for()
    page.get_by_role("button", name="Stop").first.focus()
    page.keyboard.press("Enter")
    page.locator(STATIC).nth(1).wait_for(timeout=5_000)
    text = page.locator(STATIC).first.inner_text()
    assert "✓ done" in text, "workers that ask whether to stop return"


def test_stop_ends_a_background_run(page: Any, run_cells: Callable[..., None]) -> None:
    run_cells([SLEEP + "\nrun = notebook_launcher(sleep, num_processes=2, block=False)"])
    assert stop(page) < 1


def test_stop_ends_a_blocking_run(lab: Lab, page: Any, run_cells: Callable[..., None]) -> None:
    run_cells([SLEEP], more=["notebook_launcher(sleep, num_processes=2)"])
    assert stop(page) < 1
    page.locator(".jp-OutputArea-output", has_text="RunStoppedError").first.wait_for()


def test_a_reload_keeps_the_view(page: Any, run_cells: Callable[..., None]) -> None:
    run_cells([TRAIN, LAUNCH.format(14, False)])
    page.locator(f"{VIEW} svg[aria-label*=loss]").wait_for(timeout=30_000)
    page.evaluate(SAVE)
    page.wait_for_timeout(500)
    page.goto(page.url.replace("?reset", "?"))
    wait_ready(page)
    step = page.locator(f"{VIEW} td").nth(1)
    step.wait_for(timeout=20_000)
    seen = step.inner_text()
    page.wait_for_timeout(1500)
    assert step.inner_text() != seen
    page.locator(STATIC).get_by_role("status").filter(has_text="done").wait_for(timeout=30_000)


def test_a_saved_view_can_be_read_the_next_day(
    lab: Lab, page: Any, run_cells: Callable[..., None], tmp_path: Path
) -> None:
    run_cells([TRAIN, LAUNCH.format(2, False)])
    page.locator(STATIC).wait_for(timeout=30_000)
    page.evaluate(SAVE)
    page.wait_for_timeout(500)
    for session in lab.ask("/api/sessions"):
        lab.ask(f"/api/sessions/{session['id']}", "DELETE")
    (saved,) = lab.root.glob(f"{Path(page.url.partition('?')[0]).name}")
    text = saved.read_text()
    assert "accel-run-static" in text and "widget-view" not in text and "<script" not in text
    book = json.loads(text)
    book["cells"][0]["source"] = "# from a colleague"  # whose signature is not ours: the page is sanitized
    (lab.root / f"copy_{saved.name}").write_text(json.dumps(book))
    for name, trusted in ((saved.name, True), (f"copy_{saved.name}", False)):
        page.goto(f"{lab.url}/lab/tree/{name}?reset&token={lab.token}")
        wait_ready(page)
        page.get_by_text("✓ done").first.wait_for(timeout=20_000)
        picture = page.locator("img[alt*=loss]" if trusted else ".jp-OutputArea-output img").first
        picture.wait_for(timeout=20_000)
        assert picture.evaluate("node => node.naturalWidth") > 100
        assert page.get_by_text("Error displaying widget").count() == 0
        assert (page.locator(f"{STATIC} [role=status]").count() == 1) == trusted
        page.screenshot(path=tmp_path / f"{name}.png")


@pytest.mark.parametrize("theme", ["Light", "Dark"])
def test_it_can_be_read(page: Any, run_cells: Callable[..., None], theme: str, tmp_path: Path) -> None:
    run_cells([TRAIN, LAUNCH.format(60, True)], theme=theme)
    page.locator(f"{VIEW} svg[aria-label*=loss]").wait_for(timeout=30_000)
    page.screenshot(path=tmp_path / f"running {theme}.png")
    for part in ("svg text", "td"):  # found and read in one go: an update of the view replaces both
        assert page.evaluate(f"part => ({CONTRAST})(document.querySelector(part))", f"{VIEW} {part}") >= 4, (
            part
        )
    page.locator(STATIC).wait_for(timeout=30_000)
    page.screenshot(path=tmp_path / f"failed {theme}.png")
    parts = ["[role=alert]", "[role=status]", "td", "pre span", "summary", "details pre"]
    for part in parts:
        assert page.locator(f"{STATIC} {part}").first.evaluate(CONTRAST) >= 4, part
