"""JupyterLab and a headless Chromium, for the tests of this folder."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]
READY = """async () => {
    const app = window.jupyterapp;
    if (!app) return false;
    await app.restored;
    const context = app.shell.currentWidget && app.shell.currentWidget.context;
    if (!context) return false;
    await context.ready;
    await context.sessionContext.ready;
    const kernel = context.sessionContext.session && context.sessionContext.session.kernel;
    return !!kernel && kernel.status === 'idle';
}"""
RUN = """(number) => {
    const notebook = window.jupyterapp.shell.currentWidget.content;
    notebook.activeCellIndex = number;
    notebook.deselectAll();
    window.jupyterapp.commands.execute('notebook:run-cell');
}"""


@dataclass
class Lab:
    """A JupyterLab server of the tests' own."""

    url: str
    token: str
    root: Path
    settings: Path

    def ask(self, path: str, method: str = "GET") -> Any:
        request = urllib.request.Request(
            f"{self.url}{path}", method=method, headers={"Authorization": f"token {self.token}"}
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def use_theme(self, theme: str) -> None:
        folder = self.settings / "@jupyterlab" / "apputils-extension"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "themes.jupyterlab-settings").write_text(json.dumps({"theme": f"JupyterLab {theme}"}))

    def write_notebook(self, cells: list[str]) -> str:
        """Write a notebook and return its name."""
        shown = [
            {
                "cell_type": "code",
                "id": f"c{number}",
                "metadata": {},
                "source": code,
                "outputs": [],
                "execution_count": None,
            }
            for number, code in enumerate(cells)
        ]
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        name = f"{secrets.token_hex(4)}.ipynb"
        content = {"cells": shown, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
        (self.root / name).write_text(json.dumps(content))
        return name


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A server for the tests of a module; skips where JupyterLab, playwright or Chromium is missing."""
    pytest.importorskip("jupyterlab", reason="needs JupyterLab: pip install 'notebook-accel[browser-test]'")
    pytest.importorskip("playwright", reason="needs playwright: pip install 'notebook-accel[browser-test]'")
    if CHROMIUM is None:
        pytest.skip("needs Chromium on the PATH")
    folder = tmp_path_factory.mktemp("lab")
    for name in ("config", "data", "runtime", "ipython", "settings", "workspaces", "root", "hf"):
        (folder / name).mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    lab = Lab(f"http://127.0.0.1:{port}", secrets.token_hex(16), folder / "root", folder / "settings")
    quiet = folder / "settings" / "@jupyterlab" / "apputils-extension"
    quiet.mkdir(parents=True)
    (quiet / "notification.jupyterlab-settings").write_text(
        json.dumps({"fetchNews": "false", "checkForUpdates": False})
    )
    with (folder / "log.txt").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1",
             f"--port={port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={lab.token}",
             f"--ServerApp.root_dir={lab.root}", "--expose-app-in-browser"],
            env=_environment(folder), stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        _wait_for(lab, server, folder / "log.txt")
        yield lab
        for kernel in lab.ask("/api/kernels"):
            lab.ask(f"/api/kernels/{kernel['id']}", "DELETE")
        lab.ask("/api/shutdown", "POST")
        server.wait(20)
    finally:
        if server.poll() is None:
            server.kill()
            server.wait(20)


@pytest.fixture
def page(lab: Lab) -> Iterator[Any]:
    """A browser's page; errors in it fail the test."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 1400})
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        yield page
        browser.close()
    for session in lab.ask("/api/sessions"):
        with suppress(urllib.error.HTTPError):
            lab.ask(f"/api/sessions/{session['id']}", "DELETE")
    assert not errors


@pytest.fixture
def run_cells(lab: Lab, page: Any) -> Callable[..., None]:
    """Open a notebook with these cells and run them one after the other; `more` are started and not waited for."""

    def run(cells: list[str], theme: str = "Light", more: Sequence[str] = ()) -> None:
        lab.use_theme(theme)
        name = lab.write_notebook([*cells, *more])
        page.goto(f"{lab.url}/lab/tree/{name}?reset&token={lab.token}")
        end = time.monotonic() + 60
        while not page.evaluate(READY):
            assert time.monotonic() < end, "the notebook did not get ready"
            page.wait_for_timeout(200)
        for number in range(len(cells)):
            page.evaluate(RUN, number)
            prompt = page.locator(".jp-CodeCell").nth(number).locator(".jp-InputArea-prompt")
            prompt.filter(has_text=f"[{number + 1}]:").wait_for(timeout=60_000)
        for number in range(len(cells), len(cells) + len(more)):
            page.evaluate(RUN, number)

    return run


def _environment(folder: Path) -> dict[str, str]:
    kept = {
        name: text for name, text in os.environ.items() if not name.startswith(("JUPYTER", "ACCELERATE_"))
    }
    return kept | {
        "PYTHONPATH": str(ROOT),
        "HF_HOME": str(folder / "hf"),
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
    }


def _wait_for(lab: Lab, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            lab.ask("/api/status")
            return
        except (urllib.error.URLError, ConnectionError):
            assert server.poll() is None and time.monotonic() < end, log.read_text()[-2000:]
            time.sleep(0.1)
