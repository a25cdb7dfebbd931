"""The accelerator's trackers: which `log_with` means, when they act, and what reaches the notebook."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from notebook_accel import print_metrics, probes, runtime
from notebook_accel.accelerator import Accelerator
from notebook_accel.events import Metric, Phase
from notebook_accel.launch.engines.inprocess import InProcessEngine
from notebook_accel.launch.run import Run
from notebook_accel.stream.record import RunRecord
from notebook_accel.stream.series import Point
from notebook_accel.tracking import GeneralTracker, LoggerType, choose_trackers, register_tracker_class
from notebook_accel.tracking.table import tracker_class
from notebook_accel.utils import LoggerType as LoggerTypeOfUtils
from notebook_accel.utils.registry import LOGGER_TYPE_TO_CLASS
from tests.unit.jobs import make_job
from tests.unit.multiprocess import run_ranks

pytestmark = pytest.mark.usefixtures("clean_runtime")


class Notebook(GeneralTracker):
    """A tracker of a user's: keeps what it is told."""

    name = "notebook"
    requires_logging_directory = False

    def __init__(self, *args: Any, fails: str = "", **kwargs: Any) -> None:
        super().__init__()
        self.made_with = args, kwargs
        self.calls: list[Any] = []
        self.fails = fails

    @property
    def tracker(self) -> list[Any]:
        return self.calls

    def start(self) -> None:
        self._note("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._note("config", values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._note("log", values, step, kwargs)

    def finish(self) -> None:
        self._note("finish")

    def _note(self, what: str, *details: Any) -> None:
        self.calls.append((what, *details))
        if what == self.fails:
            raise OSError(f"{what} failed")


@pytest.fixture
def registry() -> Iterator[None]:
    """Forget the classes that the test registers."""
    before = GeneralTracker._registered
    yield
    GeneralTracker._registered = before


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let wandb and mlflow be the only libraries of trackers."""
    for module in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    for module in (
        "tensorboard",
        "tensorboardX",
        "trackio",
        "aim",
        "comet_ml",
        "clearml",
        "dvclive",
        "swanlab",
    ):
        monkeypatch.setitem(sys.modules, module, None)
    probes.is_available.cache_clear()
    yield
    monkeypatch.undo()
    probes.is_available.cache_clear()


def test_a_custom_tracker_from_start_to_end() -> None:
    tracker = Notebook()
    accelerator = Accelerator(cpu=True, log_with=tracker)
    assert accelerator.log_with == [tracker] and accelerator.trackers == []
    accelerator.log({"early": 1})
    accelerator.init_trackers("proj", config={"lr": 1})
    assert accelerator.trackers == [tracker]
    accelerator.log({"loss": 0.5}, step=2, log_kwargs={"notebook": {"colour": "red"}, "wandb": {"x": 1}})
    assert accelerator.get_tracker("notebook") is tracker
    assert accelerator.get_tracker("notebook", unwrap=True) is tracker.calls
    accelerator.end_training()
    accelerator.end_training()
    assert tracker.calls == [
        ("start",),
        ("config", {"lr": 1}),
        ("log", {"loss": 0.5}, 2, {"colour": "red"}),
        ("finish",),
    ]
    accelerator.log({"late": 1})
    assert accelerator.get_tracker("notebook") is tracker and accelerator.trackers == [tracker]
    accelerator.end_training()
    assert tracker.calls[4:] == [("log", {"late": 1}, None, {}), ("finish",)]


def test_another_run_finishes_the_one_before() -> None:
    tracker = Notebook()
    accelerator = Accelerator(cpu=True, log_with=[tracker, tracker])
    accelerator.init_trackers("one")
    accelerator.init_trackers("two")
    assert accelerator.trackers == [tracker]
    assert tracker.calls == [("start",), ("finish",), ("start",)]


def test_all_trackers_are_finished_even_if_one_fails() -> None:
    trackers = [Notebook(fails="finish"), Notebook()]
    accelerator = Accelerator(cpu=True, log_with=trackers)
    accelerator.init_trackers("proj")
    with pytest.raises(OSError, match="finish failed"):
        accelerator.end_training()
    assert [tracker.calls[-1] for tracker in trackers] == [("finish",)] * 2
    accelerator.end_training()
    assert [tracker.calls.count(("finish",)) for tracker in trackers] == [1, 1]


def test_a_tracker_that_fails_to_start_is_not_in_use() -> None:
    trackers = [Notebook(), Notebook(fails="start")]
    accelerator = Accelerator(cpu=True, log_with=trackers)
    with pytest.raises(OSError, match="start failed"):
        accelerator.init_trackers("proj")
    assert accelerator.trackers == trackers[:1]


def test_get_tracker_says_why_there_is_none() -> None:
    accelerator = Accelerator(cpu=True, log_with=Notebook())
    with pytest.raises(ValueError, match="no tracker 'wandb', only notebook"):
        accelerator.get_tracker("wandb")
    with pytest.raises(RuntimeError, match="'notebook' is not running: call init_trackers first"):
        accelerator.get_tracker("notebook")
    accelerator.log_with = []
    assert accelerator.get_tracker("wandb").log({"a": 1}) is None, (
        "code that tracks runs without trackers too"
    )


def test_wrong_arguments_are_refused_before_anything_starts() -> None:
    tracker = Notebook()
    accelerator = Accelerator(cpu=True, log_with=tracker)
    with pytest.raises(TypeError, match="project_name 3 is a int"):
        accelerator.init_trackers(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="init_kwargs: tracker 'wand' is unknown, choose among all, aim"):
        accelerator.init_trackers("proj", init_kwargs={"wand": {}})
    with pytest.raises(ValueError, match="log_kwargs: tracker 'wand' is unknown"):
        accelerator.log({}, log_kwargs={"wand": {}})
    with pytest.raises(TypeError, match="log takes values by name"):
        accelerator.log(0.5)  # type: ignore[arg-type]
    assert tracker.calls == []


@pytest.mark.usefixtures("registry")
def test_a_registered_class_is_made_by_name(tmp_path: Path) -> None:
    class Filed(Notebook):
        name = "filed"
        requires_logging_directory = True

    with pytest.raises(ValueError, match=r"'filed' is unknown.* register_tracker_class in this process"):
        Accelerator(cpu=True, log_with="filed")
    register_tracker_class(Filed)
    assert LOGGER_TYPE_TO_CLASS["filed"] is Filed and "wandb" in LOGGER_TYPE_TO_CLASS
    with pytest.raises(ValueError, match="'filed' writes files: give the Accelerator a project_dir"):
        Accelerator(cpu=True, log_with="filed")
    accelerator = Accelerator(cpu=True, log_with="filed", project_dir=tmp_path)
    assert accelerator.logging_dir == tmp_path
    accelerator.init_trackers("proj", init_kwargs={"filed": {"mode": "w"}})
    assert accelerator.get_tracker("filed").made_with == (("proj", tmp_path), {"mode": "w"})


@pytest.mark.usefixtures("registry")
def test_the_classes_by_name_can_be_put_back() -> None:
    """As tests of libraries do."""

    class Other(Notebook):
        name = "other"

    before = dict(LOGGER_TYPE_TO_CLASS)
    LOGGER_TYPE_TO_CLASS["other"] = Other
    assert tracker_class("other") is Other and len(LOGGER_TYPE_TO_CLASS) == len(before) + 1
    LOGGER_TYPE_TO_CLASS.clear()
    LOGGER_TYPE_TO_CLASS.update(before)
    assert dict(LOGGER_TYPE_TO_CLASS) == before
    with pytest.raises(KeyError):
        del LOGGER_TYPE_TO_CLASS["other"]


@pytest.mark.usefixtures("registry", "installed")
def test_a_registered_class_may_shadow_a_library(recwarn: pytest.WarningsRecorder) -> None:
    class Mine(Notebook):
        name = "comet_ml"

    with pytest.warns(UserWarning, match="the tracker 'comet_ml' was .*CometMLTracker.* and is .*Mine"):
        register_tracker_class(Mine)
    register_tracker_class(Mine)
    accelerator = Accelerator(cpu=True, log_with="comet_ml")
    accelerator.init_trackers("proj")
    assert isinstance(accelerator.get_tracker("comet_ml"), Mine)


@pytest.mark.usefixtures("registry")
def test_registering_checks_the_class() -> None:
    nameless = type("Nameless", (GeneralTracker,), {"requires_logging_directory": False})
    folderless = type("Folderless", (GeneralTracker,), {"name": "x"})
    everyone = type("Everyone", (Notebook,), {"name": "all"})
    for wrong, text in (
        (3, "subclass of GeneralTracker, not 3"),
        (nameless, "Nameless.name is None"),
        (folderless, "Folderless lacks requires_logging_directory"),
        (everyone, "'all', which stands for every"),
    ):
        with pytest.raises(ValueError, match=text):
            register_tracker_class(wrong)  # type: ignore[arg-type]
    assert GeneralTracker._registered == {}


@pytest.mark.usefixtures("installed")
def test_log_with() -> None:
    own = Notebook()
    assert LoggerTypeOfUtils is LoggerType
    assert choose_trackers(None, None) == []
    assert choose_trackers("wandb", None) == ["wandb"]
    assert choose_trackers(LoggerType.MLFLOW, None) == ["mlflow"]
    assert choose_trackers(["mlflow", own, LoggerType.WANDB, "mlflow", own], None) == ["mlflow", own, "wandb"]
    assert choose_trackers("all", None) == ["wandb", "mlflow"]
    assert choose_trackers((own, LoggerType.ALL, "wandb"), None) == [own, "wandb", "mlflow"]
    with pytest.raises(
        ValueError, match="'tensorbord' is unknown, choose among all, aim, tensorboard, wandb"
    ):
        choose_trackers(["all", "tensorbord"], None)
    with pytest.raises(TypeError, match=r"not 3$"):
        choose_trackers(3, None)
    with pytest.raises(TypeError, match="make an instance of the class, or register it"):
        choose_trackers(Notebook, None)
    with pytest.raises(ImportError, match=r"'comet_ml' needs a library .*: pip install comet_ml"):
        choose_trackers("comet_ml", None)
    with pytest.raises(ImportError, match="pip install 'aim<4'"):
        choose_trackers("aim", None)


def test_a_library_is_found_once_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session of a notebook goes on after `%pip install`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "swanlab", None)
    probes.is_available.cache_clear()
    with pytest.raises(ImportError, match="pip install swanlab"):
        Accelerator(cpu=True, log_with="swanlab")
    (tmp_path / "swanlab.py").touch()
    monkeypatch.delitem(sys.modules, "swanlab")
    assert Accelerator(cpu=True, log_with="swanlab").log_with == ["swanlab"]
    monkeypatch.undo()
    probes.is_available.cache_clear()


@pytest.mark.usefixtures("installed")
def test_a_wrong_tracker_leaves_no_runtime_behind() -> None:
    with pytest.raises(ValueError, match="unknown"):
        Accelerator(cpu=True, log_with="unknown")
    assert runtime.current() is None


def ranks_track() -> tuple[Any, Any, Any]:
    tracker = Notebook()
    tracker.main_process_only = False
    reported = Reports()
    runtime.set_reporter(reported)
    accelerator = Accelerator(log_with=tracker)
    accelerator.init_trackers("proj", {"lr": 1})
    accelerator.log({"rank": accelerator.process_index}, step=1)
    got = accelerator.get_tracker("notebook")
    got.log({"direct": accelerator.process_index})
    wrong = ""
    try:
        accelerator.get_tracker("other")
    except ValueError as error:
        wrong = str(error)
    accelerator.end_training()
    return [call[0] for call in tracker.calls], reported.metrics_seen, wrong


class Reports:
    """Stands for the way to the notebook."""

    def __init__(self, *, takes: bool = True) -> None:
        self.metrics_seen: list[Any] = []
        self._takes = takes

    def takes_metrics(self, names: Any) -> bool:
        return self._takes

    def metrics(self, values: Any, step: int | None) -> None:
        self.metrics_seen.append((dict(values), step))

    def flush(self) -> None:
        pass


def test_rank_0_tracks_for_all() -> None:
    first, second = run_ranks(ranks_track)
    assert first == (
        ["start", "config", "log", "log", "finish"],
        [({"rank": 0.0}, 1)],
        "the accelerator has no tracker 'other', only notebook",
    )
    assert second == ([], [({"rank": 1.0}, 1)], first[2]), "no tracker gets them, the notebook does"


def test_a_notebook_that_keeps_no_metrics_of_this_rank_costs_it_nothing() -> None:
    class Careful(torch.Tensor):
        def item(self) -> float:
            raise AssertionError("on a GPU this would wait")

    loss = torch.ones(1).as_subclass(Careful)
    reports = Reports(takes=False)
    runtime.set_reporter(reports)
    try:
        Accelerator(cpu=True).log({"loss": loss})
        print_metrics(loss=1.0)
    finally:
        runtime.set_reporter(None)
    assert reports.metrics_seen == []


def test_numbers_reach_the_notebook() -> None:
    reports = Reports()
    runtime.set_reporter(reports)
    try:
        accelerator = Accelerator(cpu=True)
        accelerator.log({"a": torch.tensor([1.5]), "b": np.int64(2), "c": "text", "d": [1]}, np.int64(3))  # type: ignore[arg-type]
        accelerator.log({"only": "text"})
        accelerator.log({"x": True})
    finally:
        runtime.set_reporter(None)
    assert reports.metrics_seen == [({"a": 1.5, "b": 2.0}, 3), ({"x": 1.0}, None)]
    assert type(reports.metrics_seen[0][1]) is int


def test_a_step_that_is_no_whole_number_is_refused_before_anything_is_sent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reports = Reports()
    runtime.set_reporter(reports)
    tracker = Notebook()
    try:
        accelerator = Accelerator(cpu=True, log_with=tracker)
        accelerator.init_trackers("proj")
        for log in (print_metrics, accelerator.log):
            with pytest.raises(ValueError, match=r"step=0\.5: a whole number is needed"):
                log({"loss": 1.0}, step=0.5)  # type: ignore[operator]
            log({"loss": 1.0}, step=2.0)  # type: ignore[operator]
    finally:
        runtime.set_reporter(None)
    assert reports.metrics_seen == [({"loss": 1.0}, 2)] * 2
    assert capsys.readouterr().out == "step 2: loss 1\n"
    assert [call[0] for call in tracker.calls].count("log") == 1


def metric(value: float, step: int | None = None, **more: float) -> Metric:
    return Metric(rank=0, time=10.0 + value, values={"loss": value, **more}, step=step)


def test_the_record_keeps_the_values_of_each_metric() -> None:
    record = RunRecord()
    for step in range(2):
        record.apply(metric(float(step), step))
    record.apply(Phase(rank=-1, time=0.0, name="restarting"))
    record.apply(metric(7.0, None, accuracy=0.5))
    assert list(record.metrics) == ["loss", "accuracy"]
    assert list(record.metrics["loss"]) == [(0, 10.0, 0.0), (1, 11.0, 1.0), (None, 17.0, 7.0)]
    assert list(record.metrics["accuracy"]) == [Point(step=None, time=17.0, value=0.5)]


def test_a_function_launched_in_this_process_reports_too(capsys: pytest.CaptureFixture[str]) -> None:
    def train() -> str:
        accelerator = Accelerator(cpu=True)
        accelerator.log({"loss": 0.25}, step=4)
        return "trained"

    outer = Reports()
    runtime.set_reporter(outer)
    try:
        launched = Run(make_job(train, quiet=True), InProcessEngine())
        launched.execute()
        assert launched.result() == "trained"
        assert runtime.reporter() is outer
    finally:
        runtime.set_reporter(None)
    ((step, _, value),) = launched.record.metrics["loss"]
    assert (step, value) == (4, 0.25)
    assert outer.metrics_seen == []
    shown = capsys.readouterr()
    assert shown.out.strip() == "" and shown.err == ""
