"""The code of README and of the pages in docs runs as it stands, each page in a real kernel of its own."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from tests.notebooks.kernel import Kernel
from tests.structure.pages import DOCS, ROOT, Block, read_blocks

ELSEWHERE = {"from_accelerate.md"}  # tests/libraries/test_recipes.py runs its cells
NEEDS = {
    "deepspeed.md": "deepspeed",
    "first_launch.md": "transformers",
    "libraries.md": "transformers",
    "trackers.md": "tensorboard",
}
RUN = ("python", "ipython", "console")
pytestmark = [pytest.mark.notebook, pytest.mark.slow, pytest.mark.once]


def list_runnable(page: Path) -> list[Block]:
    return [block for block in read_blocks(page) if block.kind in RUN and not block.not_run]


PAGES = [
    page
    for page in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
    if page.name not in ELSEWHERE and list_runnable(page)
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    needed = NEEDS.get(page.name)
    if needed and importlib.util.find_spec(needed) is None:
        pytest.skip(f"needs {needed}")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    kernel = Kernel(tmp_path, is_copy=True, ACCELERATE_USE_CPU="true", PATH=path)
    try:
        kernel.run("import sys, torch\ntorch.set_num_threads(1)").ok()
        if needed != "deepspeed":  # Transformers would import it, which takes each process seconds
            kernel.run("sys.modules['deepspeed'] = None").ok()
        for block in list_runnable(page):
            if block.kind == "console":
                command, _, expected = block.code.removeprefix("$ ").partition("\n")
                code = (
                    f"import subprocess; print(subprocess.check_output({command!r}, shell=True, text=True))"
                )
                assert expected.strip() in kernel.run(code).ok().stdout, block.where
            else:
                cell = kernel.run(block.code)
                assert cell.error is None, f"{block.where}: {cell.traceback}"
    finally:
        kernel.close()
