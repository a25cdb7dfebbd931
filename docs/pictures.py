"""Takes the pictures of a run that README and the site show: `make pictures`.

A real JupyterLab in a headless Chromium runs a cell on two processes. The picture is that cell, while it runs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.browser.conftest import CHROMIUM, FLAGS, RUN, Lab, serve_lab  # noqa: E402

FOLDER = ROOT / "docs" / "pictures"
THEMES = {"Light": "run_light.png", "Dark": "run_dark.png"}
MOST_BYTES = 300_000
BEFORE = """
import time
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from notebook_accel import Accelerator, notebook_launcher

class Digits(Dataset):
    images, labels = load_digits(return_X_y=True)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, number):
        time.sleep(0.002)  # as if it were read from a file
        return torch.tensor(self.images[number]).float() / 16, self.labels[number]

def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

digits = Digits()
"""
SHOWN = """\
def train(epochs):
    accelerator = Accelerator()
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = DataLoader(digits, batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = 0
    for epoch in range(epochs):
        for images, labels in loader:
            loss = cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            accelerator.log({"loss": loss}, step)
        print(f"epoch {epoch}: loss of the last batch {loss.item():.3f}")
    return loss.item()

notebook_launcher(train, args=(10,), num_processes=2)"""
HIDDEN = ".jp-cell-toolbar { display: none !important; }"
"""Buttons of JupyterLab over the code."""
STEPS = 300
"""The picture is taken after so many: then the chart has its form, and the bar stands in the middle."""
HAS_STEPS = f"""() => {{
    const cells = [...document.querySelectorAll('.accel-run td')];
    return cells.some(cell => Number(cell.textContent) >= {STEPS});
}}"""


def take(lab: Lab, browser: Any, theme: str, path: Path) -> None:
    """Run the cell in a theme of JupyterLab, and write its picture."""
    lab.use_theme(theme)
    page = browser.new_page(viewport={"width": 1000, "height": 1300}, device_scale_factor=1.5)
    page.set_default_timeout(120_000)
    lab.open(page, lab.write_notebook([BEFORE.strip(), SHOWN]))
    page.evaluate("() => window.jupyterapp.commands.execute('application:toggle-left-area')")
    page.add_style_tag(content=HIDDEN)
    page.evaluate(RUN, 0)
    prompt = page.locator(".jp-CodeCell").nth(0).locator(".jp-InputArea-prompt")
    prompt.filter(has_text="[1]:").wait_for()
    page.evaluate(RUN, 1)
    page.wait_for_function(HAS_STEPS)
    page.mouse.move(5, 5)
    page.locator(".jp-CodeCell").nth(1).screenshot(path=path)
    page.close()
    lab.end_sessions()
    assert path.stat().st_size < MOST_BYTES, f"{path.name} has {path.stat().st_size} bytes"


def main() -> int:
    """Take all pictures; return the exit status."""
    if CHROMIUM is None:
        print("needs Chromium on the PATH", file=sys.stderr)
        return 1
    from playwright.sync_api import sync_playwright

    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, serve_lab(Path(folder)) as lab, sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for theme, name in THEMES.items():
            take(lab, browser, theme, FOLDER / name)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
