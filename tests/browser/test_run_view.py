"""The view of a run in a real JupyterLab."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from tests.browser.conftest import READY, Lab

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
BACKGROUND = "run = notebook_launcher(train, args=({}, {}), num_processes=2, block=False)"
VIEW = ".accel-run"
STATIC = ".accel-run-static"


@pytest.fixture
def pids(lab: Lab) -> Iterator[Callable[[str], list[psutil.Process]]]:
    """The worker processes whose ids a text has."""

    def found(text: str) -> list[psutil.Process]:
        return [psutil.Process(int(pid)) for pid in re.findall(r"pid (\d+)", text)]

    yield found


def wait_ready(page: Any) -> None:
    end = time.monotonic() + 60
    while not page.evaluate(READY):
        assert time.monotonic() < end, "the notebook did not get ready"
        page.wait_for_timeout(200)


def workers(page: Any) -> list[psutil.Process]:
    """The workers of the run in view, by the ids that they printed."""
    found = []
    for rank in (0, 1):
        page.get_by_role("tab", name=re.compile(f"rank {rank}")).click()
        pane = page.locator(".accel-run-lines:visible", has_text=re.compile(r"pid \d+"))
        pane.wait_for(timeout=30_000)
        found += re.findall(r"pid (\d+)", pane.inner_text())
    return [psutil.Process(int(pid)) for pid in found]


def test_it_lives_and_a_click_stops_it(page: Any, run_cells: Callable[..., None]) -> None:
    run_cells([TRAIN, BACKGROUND.format(60, False), "run.show()"])
    live = page.locator(VIEW)
    live.nth(1).wait_for()
    assert live.count() == 2, "the cell's view, and the one of show()"
    first = live.first
    first.get_by_text(re.compile("epoch 1")).wait_for(timeout=30_000)
    first.locator("svg[aria-label*=loss]").wait_for(timeout=30_000)
    step = first.locator("td").nth(1)
    seen = step.inner_text()
    page.wait_for_timeout(1500)
    assert step.inner_text() != seen, "the table goes on"
    assert "running" in first.get_by_role("status").inner_text()


def test_stop_ends_workers_that_do_not_ask(page: Any, run_cells: Callable[..., None]) -> None:
    code = (
        "import os, time\n"
        "from notebook_accel import notebook_launcher\n"
        "def f():\n    print('pid', os.getpid(), flush=True)\n    time.sleep(100)\n"
        "run = notebook_launcher(f, num_processes=2, block=False)"
    )
    run_cells([code])
    alive = workers(page)
    assert len(alive) == 2 and all(worker.is_running() for worker in alive)
    page.get_by_role("button", name="Stop").click()
    clicked = time.monotonic()
    page.locator(STATIC).get_by_role("status").filter(has_text="stopped").wait_for()
    assert time.monotonic() - clicked < 2
    assert not any(worker.is_running() for worker in alive)
    assert page.get_by_role("button", name="Stop").count() == 0
