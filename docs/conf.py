"""How Sphinx builds the site: `make docs`. Its source is the root of the project, so links are those of the files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXECUTED = ROOT / "build" / "tutorials"
"""Where `make docs` puts tutorials with their outputs."""
sys.path.insert(0, str(ROOT))

import notebook_accel  # noqa: E402

project = "notebook_accel"
author = "The notebook_accel authors"
copyright = author
version = release = notebook_accel.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_nb", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = ["docs/**", "tutorials/*.ipynb", "CONTRIBUTING.md", "CHANGELOG.md"]
exclude_patterns = [".*", "build", "dist", "notebook_accel", "tests", "widgets", "docs/_*"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # tutorials/run.py executes them, as `make demo` does
nb_ipywidgets_js = {}  # nothing is loaded from elsewhere
nb_mime_priority_overrides = [
    ("html", "application/vnd.jupyter.widget-view+json", None)
]  # no kernel is there

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "groupwise"
autodoc_default_options = {"members": True}
default_role = "code"  # docstrings have names between single backticks
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
nitpicky = True
# Types of other libraries have no page here, and these few of our own have none either.
nitpick_ignore_regex = [
    ("py:.*", r"(?!notebook_accel\.).*"),
    (
        "py:class",
        r"notebook_accel\.(choices\.(Choice|CustomDtype)|events\.Failure|hooks\.weights\.Weights|runtime\.Runtime)",
    ),
]

html_theme = "furo"
html_title = "notebook_accel"
html_extra_path = ["_extra"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
copybutton_exclude = ".linenos, .gp, .go"


def show_executed(app: Any, name: str, source: list[str]) -> None:
    """Give a tutorial's page the notebook with outputs, where `make docs` has executed it."""
    if name.startswith("tutorials/") and app.config.executed:
        notebook = EXECUTED / f"{Path(name).name}.ipynb"
        if notebook.exists():
            app.env.note_dependency(notebook)
            content = json.loads(notebook.read_text(encoding="utf-8"))
            content["metadata"].pop("widgets", None)  # states of live widgets, which need a kernel
            source[0] = json.dumps(content)


def setup(app: Any) -> None:
    """Join the hook to Sphinx; `-D executed=1` shows outputs."""
    app.add_config_value("executed", False, "env")
    app.connect("source-read", show_executed)
