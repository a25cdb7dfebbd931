"""All that the take-over serves is in this package by the same path: `accelerate` may be replaced by its name."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from notebook_accel import utils
from notebook_accel.takeover import names, paths
from tests.unit.takeover.test_paths import walk

ROOT = Path(__file__).resolve().parents[3]


def import_ours(path: str) -> Any:
    """Import the module of this package at a path of Accelerate."""
    return importlib.import_module(f"notebook_accel.{path}" if path else "notebook_accel")


def read_served(path: str, name: str) -> Any:
    """Return what the take-over serves under a name."""
    module, own = paths.find(path, name) or ("", "")
    return getattr(importlib.import_module(f"notebook_accel.{module}"), own)


@pytest.mark.parametrize("path", paths.PATHS)
def test_a_module_has_the_names_that_the_take_over_serves(path: str) -> None:
    module = import_ours(path)
    lacking = [name for name in paths.names_of(path) if not hasattr(module, name)]
    assert not lacking
    others = [name for name in paths.names_of(path) if getattr(module, name) is not read_served(path, name)]
    assert not others, "the same objects"
    assert set(paths.names_of(path)) <= set(dir(module))
    assert not hasattr(module, "no_such_name") and not hasattr(module, "SAGEMAKER_PYTHON_VERSION")


def test_a_module_has_the_names_that_accelerates_only_imports() -> None:
    lacking = [
        f"{path}.{name}"
        for path, _, imported in walk()
        if path in paths.PATHS
        for name in imported
        if paths.find(path, name) and not hasattr(import_ours(path), name)
    ]
    assert not lacking, f"Accelerate has these names in these modules too: {sorted(lacking)}"


@pytest.mark.parametrize("path", paths.MAINS)
def test_a_module_of_a_command_runs_it(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("notebook_accel.cli.main.main", seen.append)
    monkeypatch.setattr(sys, "argv", ["accelerate", "--option"])
    import_ours(path).main()
    assert seen == [[*paths.MAINS[path], "--option"]]


def test_python_runs_the_module_of_a_command() -> None:
    words = [sys.executable, "-m", "notebook_accel.commands.launch", "--help"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0 and "notebook-accel launch" in done.stdout, done.stderr


def test_utils_has_all_that_accelerates_has() -> None:
    """In `__all__` too, by which `import *` goes, and the types."""
    ((_, defined, imported),) = [found for found in walk() if found[0] == "utils"]
    expected = {name for name in defined | imported if paths.find("utils", name)}
    assert len(expected) > 200 and not expected - set(utils.__all__)
    found: dict[str, Any] = {}
    exec("from notebook_accel.utils import *", found)
    assert expected <= found.keys()


def test_types_know_where_the_names_of_utils_are() -> None:
    """What is imported on first use, and what type checkers import, is the same."""
    tree = ast.parse(Path(str(utils.__file__)).read_text(encoding="utf-8"))
    (typed,) = [
        node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    homes = {
        alias.name: importlib.import_module("." * node.level + str(node.module), "notebook_accel.utils")
        for node in typed.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    now = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    declared = {
        "prepare_multi_gpu_env",
        "prepare_simple_launcher_cmd_env",
    }  # of a floor above, so their types stand there
    assert homes.keys() | declared == set(utils.__all__) - now
    assert all(getattr(utils, name) is getattr(home, name) for name, home in homes.items())


def test_what_nobody_asks_for_is_not_imported() -> None:
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import notebook_accel\n"
        "assert not [name for name in sys.modules if name.startswith('notebook_accel.takeover')]\n"
        "import notebook_accel.utils\n"
        "lazy = ('fsdp_files', 'imports', 'libraries', 'machine', 'other', 'structure', 'testing')\n"
        "assert not [name for name in lazy if f'notebook_accel.utils.{name}' in sys.modules]\n"
        "assert not [name for name in sys.modules if name.startswith(('notebook_accel.cli', 'tqdm.auto'))]\n"
        "from notebook_accel.utils import SAFE_WEIGHTS_NAME\n"
        "assert SAFE_WEIGHTS_NAME == 'model.safetensors' and 'SAFE_WEIGHTS_NAME' in vars(notebook_accel.utils)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_function_keeps_its_name_where_a_module_has_the_same() -> None:
    from notebook_accel.utils.tqdm import tqdm

    assert utils.tqdm is tqdm and callable(tqdm)


def test_what_a_module_has_itself_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    module = type(sys)("notebook_accel.state")
    module.PartialState = "its own"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names.complete_names(module.__name__)
    assert module.PartialState == "its own" and module.is_initialized is not None
    with pytest.raises(AttributeError, match=r"module 'notebook_accel.state' has no attribute 'typo'"):
        _ = module.typo
