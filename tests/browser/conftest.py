"""JupyterLab, Notebook 7 and a headless Chromium, for the tests of this folder."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.ports import reserve_port

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
INSTALLED = metadata.version("ipykernel")
OTHERS = re.findall(r"(?m)^ipykernel==(\S+)$", (ROOT / "constraints-kernels.txt").read_text())
KERNELS = list(dict.fromkeys([*OTHERS, INSTALLED]))
"""Versions of ipykernel that `Lab.kernel` knows."""
APPS = {"lab": "lab/tree", "notebook": "notebooks"}
"""The pages that show a notebook, and where the server has them."""
# Notebook 7 raises these itself, whatever the notebook is: it has no file browser beside its page.
NOT_OURS = re.compile(r"reading 'schema'|'filebrowser:open-path' not registered")
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
    const runs = app.commands.isEnabled('notebook:run-cell'); // before, the command does nothing and says nothing
    return !!kernel && kernel.status === 'idle' && runs;
}"""
RUN = """(number) => {
    const notebook = window.jupyterapp.shell.currentWidget.content;
    notebook.activeCellIndex = number;
    notebook.deselectAll();
    window.jupyterapp.commands.execute('notebook:run-cell');
}"""


@dataclass
class Lab:
    """A server of the tests' own, for JupyterLab and Notebook 7."""

    url: str
    token: str
    root: Path
    settings: Path
    data: Path

    def ask(self, path: str, method: str = "GET") -> Any:
        request = urllib.request.Request(
            f"{self.url}{path}", method=method, headers={"Authorization": f"token {self.token}"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def use_theme(self, theme: str) -> None:
        folder = self.settings / "@jupyterlab" / "apputils-extension"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "themes.jupyterlab-settings").write_text(json.dumps({"theme": f"JupyterLab {theme}"}))

    def kernel(self, version: str) -> str:
        """Return the name of a kernel with this ipykernel and everything else as installed; skips without it."""
        if version == INSTALLED:
            return "python3"
        folder = ROOT / ".venv" / "kernels" / f"ipykernel-{version}"
        if not folder.is_dir():
            pytest.skip(f"needs ipykernel {version} in {folder}: make .venv/kernels/stamp")
        name = f"ipykernel-{version}"
        spec = {
            "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            "display_name": name,
            "language": "python",
            "env": {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
        }
        (self.data / "kernels" / name).mkdir(parents=True, exist_ok=True)
        (self.data / "kernels" / name / "kernel.json").write_text(json.dumps(spec))
        return name

    def write_notebook(self, cells: list[str], kernel: str = "python3") -> str:
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
        spec = {"name": kernel, "display_name": kernel, "language": "python"}
        name = f"{secrets.token_hex(4)}.ipynb"
        content = {"cells": shown, "metadata": {"kernelspec": spec}, "nbformat": 4, "nbformat_minor": 5}
        (self.root / name).write_text(json.dumps(content))
        return name

    def open(self, page: Any, name: str, app: str = "lab") -> None:
        """Show a notebook and wait until its kernel is idle."""
        page.goto(f"{self.url}/{APPS[app]}/{name}?reset&token={self.token}")
        end = time.monotonic() + 90
        while not page.evaluate(READY):
            assert time.monotonic() < end, "the notebook did not get ready"
            page.wait_for_timeout(100)

    def end_sessions(self) -> None:
        """Shut the kernels of all notebooks down."""
        for session in self.ask("/api/sessions"):
            with suppress(urllib.error.HTTPError):
                self.ask(f"/api/sessions/{session['id']}", "DELETE")


def list_lab_flags(lab: Lab) -> list[str]:
    """Return what starts a server of JupyterLab and Notebook 7, after `python`."""
    return [
        "-m",
        "jupyterlab",
        "--ServerApp.port_retries=0",
        f"--IdentityProvider.token={lab.token}",
        f"--ServerApp.root_dir={lab.root}",
        "--expose-app-in-browser",
        "--JupyterNotebookApp.expose_app_in_browser=True",
    ]


def list_classic_flags(lab: Lab) -> list[str]:
    """Return what starts a server of the classic notebook, version 6, after `python`."""
    return [
        "-m",
        "notebook",
        "--NotebookApp.port_retries=0",
        f"--NotebookApp.token={lab.token}",
        f"--NotebookApp.notebook_dir={lab.root}",
    ]


@contextmanager
def serve_lab(
    folder: Path, python: str = sys.executable, flags: Callable[[Lab], list[str]] = list_lab_flags
) -> Iterator[Lab]:
    """Run a server whose files are all in a folder; yields it when it answers."""
    for name in ("config", "data", "runtime", "ipython", "settings", "workspaces", "root", "hf"):
        (folder / name).mkdir()
    with reserve_port() as port:
        lab = Lab(
            url=f"http://127.0.0.1:{port}",
            token=secrets.token_hex(16),
            root=folder / "root",
            settings=folder / "settings",
            data=folder / "data",
        )
        quiet = folder / "settings" / "@jupyterlab" / "apputils-extension"
        quiet.mkdir(parents=True)
        (quiet / "notification.jupyterlab-settings").write_text(
            json.dumps({"fetchNews": "false", "checkForUpdates": False})
        )
        place = ["--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"]
        with (folder / "log.txt").open("w") as log:
            server = subprocess.Popen(
                [python, *flags(lab), *place],
                env=_environment(folder), stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        try:
            _wait_for(lab, server, folder / "log.txt")
            yield lab
            for kernel in lab.ask("/api/kernels"):
                lab.ask(f"/api/kernels/{kernel['id']}", "DELETE")
            lab.ask("/api/shutdown", "POST")
            server.wait(60)
        finally:
            if server.poll() is None:
                server.kill()
                server.wait(60)


@pytest.fixture(scope="package")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A server for the tests of this folder; skips where a front end, playwright or Chromium is missing."""
    for needed in ("jupyterlab", "notebook", "playwright"):
        pytest.importorskip(needed, reason=f"needs {needed}: pip install 'notebook-accel[browser-test]'")
    if CHROMIUM is None:
        pytest.skip("needs Chromium on the PATH")
    with serve_lab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@contextmanager
def open_page(lab: Lab, not_ours: re.Pattern[str]) -> Iterator[Any]:
    """Open a browser's page; errors in it fail the test.

    Args:
        lab: the server, whose kernels are ended afterwards.
        not_ours: is found in errors that do not count.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 1400})
        page.set_default_timeout(90_000)  # of what comes at once on an idle machine
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        yield page
        browser.close()
    lab.end_sessions()
    assert not [error for error in errors if not not_ours.search(error)]


@pytest.fixture
def page(lab: Lab) -> Iterator[Any]:
    """A page for notebooks of the server."""
    with open_page(lab, NOT_OURS) as opened:
        yield opened


@pytest.fixture
def run_cells(lab: Lab, page: Any) -> Callable[..., str]:
    """Open a notebook with these cells, run them one after the other and return its name.

    `more` are cells that are started and not waited for.
    """

    def run(
        cells: list[str],
        theme: str = "Light",
        more: Sequence[str] = (),
        app: str = "lab",
        kernel: str = "python3",
    ) -> str:
        lab.use_theme(theme)
        name = lab.write_notebook([*cells, *more], kernel)
        lab.open(page, name, app)
        for number in range(len(cells)):
            page.evaluate(RUN, number)
            prompt = page.locator(".jp-CodeCell").nth(number).locator(".jp-InputArea-prompt")
            prompt.filter(has_text=f"[{number + 1}]:").wait_for()
        for number in range(len(cells), len(cells) + len(more)):
            page.evaluate(RUN, number)
        return name

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
    end = time.monotonic() + 120
    while True:
        try:
            lab.ask("/api/status")
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            assert server.poll() is None and time.monotonic() < end, log.read_text()[-2000:]
            time.sleep(0.1)
