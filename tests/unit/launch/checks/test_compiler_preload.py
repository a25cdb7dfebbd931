"""Which functions need torch's compiler, and what its import leaves as it was."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD

from notebook_accel.launch.checks import compiler_preload

HOME = {"__name__": "cells", "torch": torch, "SGD": SGD, "functools": functools}


def _defined(code: str) -> Any:
    """Return `run` of code that is run as the cells of a notebook are: one module that has no file."""
    scope = dict(HOME)
    exec(textwrap.dedent(code), scope)
    return scope["run"]


@pytest.mark.parametrize(
    "code",
    [
        "def run(): torch.optim.SGD(parameters, lr=0.1)",
        "def run(): SGD(parameters, lr=0.1)",
        "def run(loss): loss.backward()",
        "def run():\n    from torch.optim import AdamW",
        "def run():\n    def step(): torch.optim\n    step()",
        "def make(): return SGD(parameters)\ndef run(): make()",
        "def make(): return SGD(parameters)\nrun = functools.partial(lambda number: make(), 1)",
        "class Training:\n    def step(self): self.loss.backward()\ndef run(): Training()",
        "class Training:\n    @staticmethod\n    def step(loss): loss.backward()\n"
        "mine = Training()\ndef run(): mine.step()",
        "class Training:\n    def step(self): self.loss.backward()\nrun = Training().step",
        "class Base:\n    def step(self): SGD(parameters)\nclass Training(Base): pass\nrun = Training().step",
        "class Base:\n    def step(self): SGD(parameters)\nclass Training(Base): pass\ndef run(): Training()",
        "class Training:\n    def __call__(self): SGD(parameters)\nrun = Training()",
        "def decorated(function):\n    def inner(): function()\n    return inner\n"
        "@decorated\ndef run(): SGD(parameters)",
        "class Mine(SGD): pass\ndef run(): Mine(parameters)",
        "def run(accelerator, model): accelerator.prepare(model)(1)",
        "def run(model): torch.compile(model)(1)",
        "def run(): torch.use_deterministic_algorithms(True)",
    ],
)
def test_training_is_seen(code: str) -> None:
    assert compiler_preload.is_needed_by(_defined(code))


@pytest.mark.parametrize(
    "code",
    [
        "def run(): return torch.ones(3).sum()",
        "def train(): SGD(parameters)\ndef run(): pass",
        "def one(): two()\ndef two(): one()\ndef run(): one(); unknown()",
        "def outer():\n    def run(): later()\n    return run\n    later = 1\nrun = outer()",
        "import torch.nn\ndef run(): torch.nn.Linear(1, 1)",
        "run = functools.partial(print, 1)",
        "import re\ndef run(): re.compile('x')",
    ],
)
def test_other_functions_do_not_wait_for_it(code: str) -> None:
    assert not compiler_preload.is_needed_by(_defined(code))


@pytest.mark.parametrize(
    "cell",
    [
        "from mine import loop\ndef run(): loop()",
        "import mine\ndef run(): mine.loop()",
        "import mine as library\nclass Run:\n    def __call__(self): library.loop()\nrun = Run()",
    ],
)
def test_the_user_s_own_modules_are_looked_into(
    cell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(
        "def loop(): step()\ndef step(loss): loss.backward()\ndef other(): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert compiler_preload.is_needed_by(_defined(cell))
        assert not compiler_preload.is_needed_by(_defined(cell.replace("loop", "other")))
    finally:
        del sys.modules["mine"]


@pytest.mark.parametrize(
    "code",
    [
        "from notebook_accel import Accelerator\ndef run(): Accelerator()",
        "from torch.autograd import grad\ndef run(): grad()",
        "import unittest\ndef run(): unittest.main()",
        "from notebook_accel import local_sgd\ndef run(): local_sgd.LocalSGD",
    ],
)
def test_installed_packages_are_not_looked_into(code: str) -> None:
    assert not compiler_preload.is_needed_by(_defined(code))


@pytest.mark.parametrize("function", [print, len, [].append, int, torch.ones, str.upper])
def test_what_has_no_code_to_look_at(function: Callable[..., Any]) -> None:
    assert not compiler_preload.is_needed_by(function)


def test_no_code_of_the_user_s_objects_is_run() -> None:
    code = """
    class Strange:
        def __getattr__(self, name): raise RuntimeError(name)
        @property
        def __class__(self): raise RuntimeError("class")
    class Kind(type):
        def __eq__(self, other): raise RuntimeError("equal")
        __hash__ = None
    class Unhashable(metaclass=Kind): pass
    strange = Strange()
    def run(): return strange, Unhashable
    """
    assert not compiler_preload.is_needed_by(_defined(code))


def test_the_import_leaves_the_process_as_it_was_and_fit_to_be_forked() -> None:
    code = """
    import os, signal, sys, threading, torch
    from notebook_accel.launch.checks import compiler_preload, fork_obstacles

    def state():
        handlers = [signal.getsignal(number) for number in signal.valid_signals()]
        return (
            dict(os.environ), handlers, threading.enumerate(), sorted(os.listdir("/proc/self/task")),
            len(os.listdir("/proc/self/fd")), torch.get_rng_state().tolist(), fork_obstacles.reasons(),
        )

    def train(): torch.optim.SGD

    while fork_obstacles.reasons():  # OpenBLAS's threads spin a while first: long, on a busy machine
        pass
    before = state()
    assert not compiler_preload.load_for(print) and not compiler_preload.is_loaded()
    assert compiler_preload.load_for(train) and compiler_preload.is_loaded()
    assert not compiler_preload.load_for(train)
    assert state() == before, (state(), before)
    """
    if sys.platform != "linux":
        pytest.skip("the process is looked at through /proc")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr


def test_an_interrupt_comes_after_the_import() -> None:
    code = """
    import os, signal, sys, torch
    from notebook_accel.launch.checks import compiler_preload

    class Interrupting:
        def find_spec(self, name, path, target=None):
            if name == "torch._dynamo.eval_frame":
                os.kill(os.getpid(), signal.SIGINT)

    sys.meta_path.insert(0, Interrupting())
    def train(): torch.optim.SGD
    environment = dict(os.environ)
    try:
        compiler_preload.load_for(train)
    except KeyboardInterrupt:
        assert os.environ == environment
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        print("interrupted, whole")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=240
    )
    assert done.stdout == "interrupted, whole\n", done.stderr


def test_without_a_compiler_that_can_be_imported_the_launch_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_preload, "MODULE", "torch._no_such_module")
    assert compiler_preload.load_for(_defined("def run(): SGD(parameters)"))
