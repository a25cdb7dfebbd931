"""What a notebook set in libraries is named where `auto` chose fresh workers, which do not have it."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim import SGD

from notebook_accel.launch.checks import fork_safety
from notebook_accel.launch.checks.patches import PatchWatch, describe
from tests.unit.jobs import make_job

MSE, STEP = "torch.nn.functional.mse_loss", "torch.optim.sgd.SGD.step"
FRESH = fork_safety.choose_start_method(["a reason"])
CHOSEN: dict[str, Any] = {"name": "train", "start_method": FRESH, "options": {"start_method": "auto"}}
CELL = """
import builtins, functools, sys, torch
import torch.nn.functional as F
from torch.optim import SGD
class Mine: pass
def loss(*args): return 0
def make():
    def inner(*args): return 0
    return inner
"""


class Notebook:
    """Runs code as the cells of a notebook are run: in a module `__main__` that has no file."""

    def __init__(self) -> None:
        self.module = types.ModuleType("__main__")
        self.run(CELL)

    def run(self, code: str) -> None:
        exec(textwrap.dedent(code), vars(self.module))


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    """What its cells set in torch is undone after the test."""
    for owner, name in ((F, "mse_loss"), (SGD, "step"), (torch.optim, "SGD")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    started = Notebook()
    monkeypatch.setitem(sys.modules, "__main__", started.module)
    return started


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> types.ModuleType:
    """A module of a file."""
    (tmp_path / "some_library.py").write_text(
        "def loss(): pass\ndef other(): pass\nregistry = {}\nclass Trainer: pass"
    )
    spec = importlib.util.spec_from_file_location("some_library", tmp_path / "some_library.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "some_library", module)
    return module


@pytest.fixture(scope="module")
def watch() -> PatchWatch:
    """The first look takes much longer than those that follow."""
    return PatchWatch()


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("F.mse_loss = loss", [MSE]),
        ("F.mse_loss = lambda *args: 0", [MSE]),
        ("F.mse_loss = make()", [MSE]),
        ("F.mse_loss = functools.partial(loss, 1)", [MSE]),
        ("F.mse_loss = functools.lru_cache(loss)", [MSE]),
        ("F.mse_loss = torch.no_grad()(loss)", [MSE]),
        ("F.mse_loss = functools.wraps(F.mse_loss)(lambda *args: 0)", [MSE]),
        ("F.mse_loss = torch.no_grad()(functools.wraps(F.mse_loss)(lambda *args: 0))", [MSE]),
        ("SGD.step = loss", [STEP]),
        ("SGD.step = staticmethod(loss)", [STEP]),
        ("SGD.step = property(loss)", [STEP]),
        ("SGD.step = functools.partialmethod(loss, 1)", [STEP]),
        # torch wraps `step` of a class as soon as there is an optimizer
        ("SGD.step = functools.wraps(SGD.step)(lambda self: 0)\nSGD([torch.zeros(1)])", [STEP]),
        ("torch.optim.SGD = Mine", ["torch.optim.SGD"]),
        ("F.mse_loss = SGD.step = loss", [MSE, STEP]),
        ("F.mse_loss = F.l1_loss", []),
        ("F.mse_loss = functools.partial(F.mse_loss, reduction='sum')", []),
        ("class Mine(SGD): pass\nMine([torch.zeros(1)]).step()", []),
        ("sys.last_type = Mine", []),
    ],
)
def test_what_is_of_a_cell_is_named_and_nothing_else(
    notebook: Notebook, watch: PatchWatch, monkeypatch: pytest.MonkeyPatch, code: str, names: list[str]
) -> None:
    monkeypatch.setattr(sys, "last_type", ValueError, raising=False)
    assert watch.find() == [], "the tests and this package set nothing that counts"
    notebook.run(code)
    assert watch.find() == watch.find() == names


def test_what_is_undone_is_not_named_and_what_is_set_anew_is(
    notebook: Notebook, library: types.ModuleType, watch: PatchWatch
) -> None:
    installed = library.loss
    for code, names in (
        ("some_library.loss = loss", ["some_library.loss"]),
        ("some_library.loss = installed", []),
        ("some_library.Trainer.compute_loss = loss", ["some_library.Trainer.compute_loss"]),
        ("del some_library.Trainer.compute_loss", []),
        ("some_library.registry['loss'] = loss", []),
        ("del sys.modules['some_library']\nsome_library.loss = loss", []),
    ):
        vars(notebook.module).update(some_library=library, installed=installed)
        notebook.run(code)
        assert watch.find() == names, code


def test_no_code_of_what_is_looked_at_is_run(
    notebook: Notebook,
    library: types.ModuleType,
    watch: PatchWatch,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "lazy_library.py").write_text("raise RuntimeError('it is imported')")
    spec = importlib.util.spec_from_file_location("lazy_library", tmp_path / "lazy_library.py")
    assert spec is not None and spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lazy)
    monkeypatch.setitem(sys.modules, "lazy_library", lazy)
    monkeypatch.setitem(sys.modules, "hidden_library", None)  # type: ignore[arg-type]
    scope = {"library": library, "types": types, "__name__": "some_library"}
    code = """
    class Kind(type):
        def __eq__(self, other): raise RuntimeError("equal")
        def __getattribute__(self, name): raise RuntimeError(name)
        def __instancecheck__(self, value): raise RuntimeError("instance")
        def __subclasscheck__(self, value): raise RuntimeError("subclass")
        __hash__ = None
    class Strange(metaclass=Kind):
        def __getattribute__(self, name): raise RuntimeError(name)
        def __eq__(self, other): raise RuntimeError("equal")
    library.Strange, library.strange = Strange, Strange()
    library.Inner = Kind("Inner", (), {"part": Strange(), "__module__": Strange()})
    """
    exec(textwrap.dedent(code), scope)
    assert watch.find() == []
    scope["loss"] = notebook.module.loss
    exec("type.__setattr__(library.Strange, 'loss', loss)", scope)
    assert watch.find() == ["some_library.Strange.loss"]


def test_a_launch_names_three_of_them(notebook: Notebook, library: types.ModuleType) -> None:
    job = make_job(local_world_size=2, **CHOSEN)
    assert describe(job) == ""
    notebook.run("F.mse_loss = loss")
    assert (
        describe(job)
        == f"{MSE} was set in this process, which fresh workers do not see; do it in the function"
    )
    notebook.run("SGD.step = loss")
    library.loss = library.other = library.third = notebook.module.loss  # type: ignore[attr-defined]
    assert describe(job).startswith(f"{MSE}, {STEP}, some_library.loss and 2 more were set in this process")


@pytest.mark.parametrize(
    "options",
    [{"start_method": "fork"}, {"options": {"start_method": FRESH}}, {"distributed": False}, {"quiet": True}],
    ids=["forks", "asked for", "this process", "no line"],
)
def test_only_where_auto_chose_fresh_workers(notebook: Notebook, options: dict[str, Any]) -> None:
    notebook.run("F.mse_loss = loss")
    assert describe(make_job(local_world_size=2, **{**CHOSEN, **options})) == ""
