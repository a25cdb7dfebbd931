"""The callback that Trainer gets: what it reports, when it saves, and where there is none."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from notebook_accel import Accelerator, runtime
from notebook_accel.accelerator.trainer import make_callback
from notebook_accel.takeover import finder


class Reporter:
    """Keeps what it gets, and stops from a question on."""

    def __init__(self, last: int = 10**6) -> None:
        self.got: list[tuple[dict[str, float], int | None]] = []
        self._questions, self._last = 0, last

    def takes_metrics(self, names: Iterable[str]) -> bool:
        return True

    def metrics(self, values: Mapping[str, float], step: int | None) -> None:
        self.got.append((dict(values), step))

    def flush(self) -> None:
        pass

    def should_stop(self) -> bool:
        self._questions += 1
        return self._questions >= self._last


class Base:
    """Stands for TrainerCallback, whose methods do nothing."""


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, clean_runtime: None) -> Any:
    """The module `transformers.trainer`, in a process that takes over and reports."""
    top, inner = types.ModuleType("transformers"), types.ModuleType("transformers.trainer")
    vars(top).update(TrainerCallback=Base, __version__="9.8.7")
    vars(inner).update(DEFAULT_CALLBACKS=[Base])
    monkeypatch.setitem(sys.modules, "transformers", top)
    monkeypatch.setitem(sys.modules, "transformers.trainer", inner)
    monkeypatch.setattr(finder, "is_installed", lambda: True)
    monkeypatch.setattr(runtime, "_reporter", Reporter())
    return inner


def make_state(step: int, epoch: float) -> tuple[Any, Any]:
    control = SimpleNamespace(
        should_save=False, should_training_stop=False, should_evaluate=True, should_log=True
    )
    return SimpleNamespace(global_step=step, epoch=epoch), control


def test_each_trainer_gets_it_once(library: Any) -> None:
    Accelerator(cpu=True)
    Accelerator(cpu=True)
    assert [Base, make_callback(Base)] == library.DEFAULT_CALLBACKS
    assert issubclass(make_callback(Base), Base)


@pytest.mark.parametrize("lacks", ["reporter", "take-over", "trainer"])
def test_there_is_none_where_it_has_no_part(
    library: Any, lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacks == "reporter":
        monkeypatch.setattr(runtime, "_reporter", None)
    elif lacks == "take-over":
        monkeypatch.setattr(finder, "is_installed", lambda: False)
    else:
        monkeypatch.delitem(sys.modules, "transformers.trainer")
    Accelerator(cpu=True)
    assert [Base] == library.DEFAULT_CALLBACKS


@pytest.mark.parametrize("name", ["TrainerCallback", "DEFAULT_CALLBACKS"])
def test_a_version_that_it_does_not_fit_is_named(library: Any, name: str) -> None:
    vars(library if name in vars(library) else sys.modules["transformers"]).pop(name)
    with pytest.warns(UserWarning, match=r"transformers 9\.8\.7 is not known.*without a checkpoint"):
        Accelerator(cpu=True)


def test_numbers_of_a_log_are_reported_with_their_step(library: Any) -> None:
    Accelerator(cpu=True)
    state, control = make_state(7, 0.5)
    make_callback(Base)().on_log(None, state, control, logs={"loss": 0.25, "eval_note": "good", "epoch": 0.5})
    assert runtime.reporter().got == [({"loss": 0.25, "epoch": 0.5}, 7)]  # type: ignore[union-attr]


def test_a_stop_saves_and_leaves_the_end_of_the_epoch_to_who_resumes(
    library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Accelerator(cpu=True)
    monkeypatch.setattr(runtime, "_reporter", Reporter(last=2))
    callback = make_callback(Base)()
    state, control = make_state(1, 0.5)
    callback.on_train_begin(None, state, control)
    callback.on_step_end(None, state, control)
    assert not control.should_save and not control.should_training_stop
    callback.on_step_end(None, state, control)
    assert control.should_save and control.should_training_stop and control.should_evaluate
    callback.on_save(None, state, control)
    callback.on_epoch_end(None, state, control)
    assert (control.should_save, control.should_evaluate, control.should_log) == (False, False, False)


@pytest.mark.parametrize(
    ("epoch", "saved", "expected"), [(0.5, False, (True, False)), (2.0, True, (True, True))]
)
def test_the_end_of_an_epoch_saves_what_the_step_has_not(
    library: Any, monkeypatch: pytest.MonkeyPatch, epoch: float, saved: bool, expected: tuple[bool, bool]
) -> None:
    Accelerator(cpu=True)
    monkeypatch.setattr(runtime, "_reporter", Reporter(last=1))
    callback = make_callback(Base)()
    state, control = make_state(5, epoch)
    callback.on_step_end(None, state, control)
    control.should_save = False
    if saved:
        callback.on_save(None, state, control)
    callback.on_epoch_end(None, state, control)
    assert (control.should_save, control.should_evaluate) == expected


def test_an_epoch_of_a_run_that_goes_on_is_as_trainer_has_it(library: Any) -> None:
    Accelerator(cpu=True)
    callback = make_callback(Base)()
    state, control = make_state(5, 1.0)
    callback.on_step_end(None, state, control)
    callback.on_epoch_end(None, state, control)
    assert (control.should_save, control.should_evaluate, control.should_log) == (False, True, True)
