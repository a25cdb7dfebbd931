"""The site builds without a warning, and has the pages, the names and the tutorials."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.structure.pages import DOCS, ROOT, list_contents

NEEDED = ("sphinx", "furo", "myst_nb", "sphinx_copybutton")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the site, built as `make docs EXECUTE=no` does."""
    for name in NEEDED:
        pytest.importorskip(name, reason=f"needs {name}: pip install 'notebook-accel[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going"]
    places = ["--conf-dir", "docs", "--doctree-dir", str(folder / "doctrees"), ".", str(folder / "html")]
    done = subprocess.run(
        [*command, *places], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-8000:]
    yield folder / "html"


def test_every_page_is_made(site: Path) -> None:
    sources = [path.relative_to(ROOT).with_suffix(".html") for path in list_contents(DOCS / "index.md")]
    assert len(sources) > 40
    assert not [name for name in sources if not (site / name).exists()]


def test_the_first_page_leads_to_the_index(site: Path) -> None:
    found = re.search(r"url=([^\"]+)", (site / "index.html").read_text())
    assert found and (site / found[1]).exists()


def test_the_reference_says_what_arguments_mean(site: Path) -> None:
    text = (site / "docs" / "api" / "launching.html").read_text()
    assert 'id="notebook_accel.notebook_launcher"' in text
    told = re.sub(r"<[^>]+>", "", text)
    assert re.search(r"num_processes \(int \| None\) . number of processes on this node", told)
    assert 'id="notebook_accel.Accelerator.prepare"' in (site / "docs/api/accelerator.html").read_text()


def test_tutorials_are_pages_and_not_run(site: Path) -> None:
    text = (site / "tutorials" / "01_first_launch.html").read_text()
    assert "cell_input" in text and "cell_output" not in text


def test_a_tutorial_that_was_executed_is_shown_with_its_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("conf", DOCS / "conf.py")
    assert spec and spec.loader
    conf = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conf)
    monkeypatch.setattr(conf, "EXECUTED", tmp_path)
    (tmp_path / "one.ipynb").write_text('{"cells": ["executed"], "metadata": {"widgets": {}}}')
    noted: list[Path] = []
    environment = SimpleNamespace(note_dependency=noted.append)
    for executed, name, expected in (
        (True, "tutorials/one", "executed"),
        (True, "tutorials/two", "stored"),
        (False, "tutorials/one", "stored"),
        (True, "docs/one", "stored"),
    ):
        source = ["stored"]
        app = SimpleNamespace(config=SimpleNamespace(executed=executed), env=environment)
        conf.show_executed(app, name, source)
        assert expected in source[0] and "widgets" not in source[0]
    assert noted == [tmp_path / "one.ipynb"]


def test_links_between_pages_are_links_of_the_site(site: Path) -> None:
    text = (site / "docs" / "index.html").read_text()
    assert 'href="../tutorials/01_first_launch.html"' in text and 'href="../CONTRIBUTING.html"' in text
    assert 'href="docs/options.html"' in (site / "CONTRIBUTING.html").read_text()
