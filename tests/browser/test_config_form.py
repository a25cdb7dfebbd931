"""The form for launch options in a real JupyterLab."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from notebook_accel.config import file
from tests.browser.conftest import Lab

pytestmark = [pytest.mark.browser, pytest.mark.notebook, pytest.mark.timeout(300)]

FORM = """
import os, threading
from notebook_accel.widgets import ConfigForm

def train(word):
    print(word, "from rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"])
    return "the end"

form = ConfigForm(function=train, args=("hello",), path="saved.yaml")
form
"""


def test_change_save_and_launch(lab: Lab, page: Any, run_cells: Callable[..., str]) -> None:
    run_cells([FORM])
    processes = page.get_by_label("num_processes")
    processes.wait_for()
    assert page.get_by_label("fsdp_version").count() == 0
    page.get_by_label("distributed_type").select_option("FSDP")
    page.get_by_label("fsdp_version").wait_for()
    page.get_by_label("distributed_type").select_option("NO")
    page.get_by_label("fsdp_version").wait_for(state="detached")

    row = page.locator(".accel-row", has=processes)
    processes.fill("two")
    row.get_by_role("alert").get_by_text("num_processes 'two' is no whole number", exact=True).wait_for()
    page.locator(".accel-form").get_by_role("button", name="Save", exact=True, disabled=True).wait_for()
    page.locator(".accel-form").get_by_role("button", name="Launch", disabled=True).wait_for()
    processes.fill("2")
    row.get_by_role("alert").wait_for(state="detached")
    page.get_by_label("mixed_precision").select_option("bf16")
    page.locator(".accel-preview", has_text="mixed_precision: bf16").wait_for()

    page.locator(".accel-form").get_by_role("button", name="Save", exact=True).click()
    page.locator(".accel-form").get_by_role("status").filter(has_text="Saved saved.yaml").wait_for()
    saved = file.read(lab.root / "saved.yaml").config
    assert (saved.num_processes, saved.mixed_precision) == (2, "bf16")
    page.locator(".accel-form").get_by_role("button", name="Save", exact=True).click()
    page.locator(".accel-form").get_by_role("button", name="Overwrite?").click()
    page.locator(".accel-form").get_by_role("button", name="Save", exact=True).wait_for()

    page.locator(".accel-form").get_by_role("button", name="Launch").click()
    output = page.locator(".accel-output")
    for line in ("[0] hello from rank 0 of 2", "[1] hello from rank 1 of 2", "'the end'"):
        output.get_by_text(line).wait_for()


def test_errors_and_output_come_live_into_the_form(
    lab: Lab, page: Any, run_cells: Callable[..., str]
) -> None:
    wait = "import time\n    while not os.path.exists('go'):\n        time.sleep(0.05)"
    code = FORM.replace("return", f"{wait}\n    raise OSError('disk gone')\n    return")
    run_cells([code, "print('a later cell')"])
    page.get_by_label("num_processes").fill("2")
    page.locator(".accel-form").get_by_role("button", name="Launch").click()
    output = page.locator(".accel-output")
    output.get_by_text("[1] hello from rank 1 of 2").wait_for()
    assert output.get_by_text("disk gone").count() == 0, "lines come while it runs"
    (lab.root / "go").touch()
    output.get_by_text(re.compile("OSError: disk gone")).first.wait_for()
    page.locator(".accel-form").get_by_role("button", name="Launch", disabled=False).wait_for()


@pytest.mark.parametrize("theme", ["Light", "Dark"])
def test_it_can_be_read(page: Any, run_cells: Callable[..., str], theme: str, tmp_path: Path) -> None:
    run_cells(["%load_ext notebook_accel", "%accel_config"], theme=theme)
    processes = page.get_by_label("num_processes")
    processes.fill("0")
    wrong = page.get_by_role("alert").get_by_text("num_processes 0 is less than 1", exact=True)
    wrong.wait_for()
    page.screenshot(path=tmp_path / f"{theme}.png")
    for text in (wrong, page.get_by_text("Number of nodes.", exact=True)):
        assert text.evaluate(CONTRAST) >= 4, "as dark as its ground"
    processes.focus()
    page.keyboard.press("Tab")
    assert page.get_by_label("num_machines").evaluate("node => node === document.activeElement")


CONTRAST = """node => {
    const numbers = text => text.match(/[\\d.]+/g).map(Number);
    const light = parts => {
        const linear = parts.map(part => part / 255)
            .map(part => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
    };
    let opacity = 1, ground = node;
    while (/rgba\\(0, 0, 0, 0\\)/.test(getComputedStyle(ground).backgroundColor)) {
        opacity *= getComputedStyle(ground).opacity;
        ground = ground.parentElement;
    }
    const under = numbers(getComputedStyle(ground).backgroundColor).slice(0, 3);
    const [red, green, blue, alpha = 1] = numbers(getComputedStyle(node).color);
    const seen = [red, green, blue].map((part, i) => part * alpha * opacity + under[i] * (1 - alpha * opacity));
    const pair = [light(seen), light(under)].sort((a, b) => b - a);
    return (pair[0] + 0.05) / (pair[1] + 0.05);
}"""
