"""Every tracker adapter keeps the same contract, and asks its library for the right things."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, call

import numpy as np
import pytest
import torch
import yaml

from notebook_accel import probes, tracking
from notebook_accel.tracking import GeneralTracker
from notebook_accel.tracking.base import SilentTracker
from notebook_accel.tracking.values import as_number, numbers_in, plain
from tests.structure.source import ROOT
from tests.unit.multiprocess import run_ranks

pytestmark = pytest.mark.usefixtures("clean_runtime")


@dataclass(frozen=True)
class ExpectedCalls:
    """How a tracker is made, what stands for its library, and the calls that its library has to see.

    Paths such as that of `run` are dotted names in the fake library, with `()` for a call's result. `takes_texts` says
    whether it logs texts too, `main_process_only` whether rank 0 alone may call it.
    """

    kind: type[GeneralTracker]
    modules: tuple[str, ...]
    run: str
    started: tuple[str, Any]
    stored: tuple[str, Any]
    logged: list[tuple[str, Any]]
    finished: tuple[str, Any]
    options: dict[str, Any] = field(default_factory=lambda: {"tags": ["one"]})
    takes_texts: bool = True
    main_process_only: bool = True


LOGGED = {"train_loss": torch.tensor(0.5), "epoch": np.float32(2.0), "note": "good"}
CONFIG = {"lr": 0.1}
EXPECTED = [
    ExpectedCalls(
        kind=tracking.WandBTracker,
        modules=("wandb",),
        run="init()",
        started=("init", call(project="proj", tags=["one"])),
        stored=("init().config.update", call(CONFIG, allow_val_change=True)),
        logged=[("init().log", call(LOGGED, step=3, commit=True))],
        finished=("init().finish", call()),
        main_process_only=False,
    ),
    ExpectedCalls(
        kind=tracking.SwanLabTracker,
        modules=("swanlab",),
        run="init()",
        started=("init", call(project="proj", tags=["one"])),
        stored=("config.update", call(CONFIG)),
        logged=[("init().log", call(LOGGED, step=3, commit=True))],
        finished=("init().finish", call()),
        main_process_only=False,
    ),
    ExpectedCalls(
        kind=tracking.TrackioTracker,
        modules=("trackio",),
        run="init()",
        started=("init", call(project="proj", tags=["one"])),
        stored=("init().config.update", call(CONFIG)),
        logged=[("init().log", call(LOGGED, step=3, commit=True))],
        finished=("init().finish", call()),
        main_process_only=False,
    ),
    ExpectedCalls(
        kind=tracking.CometMLTracker,
        modules=("comet_ml",),
        run="start()",
        started=("start", call(project_name="proj", tags=["one"])),
        stored=("start().log_parameters", call(CONFIG)),
        logged=[
            ("start().set_step", call(3)),
            ("start().log_metric", call("train_loss", 0.5, step=3, commit=True)),
            ("start().log_metric", call("epoch", 2.0, step=3, commit=True)),
            ("start().log_other", call("note", "good", commit=True)),
        ],
        finished=("start().end", call()),
    ),
    ExpectedCalls(
        kind=tracking.AimTracker,
        modules=("aim",),
        run="Run()",
        started=("Run", call(repo="logs", tags=["one"])),
        stored=("Run().__setitem__", call("hparams", CONFIG)),
        logged=[
            ("Run().track", call(LOGGED["train_loss"], name="train_loss", step=3, commit=True)),
            ("Run().track", call(LOGGED["epoch"], name="epoch", step=3, commit=True)),
            ("Run().track", call("good", name="note", step=3, commit=True)),
        ],
        finished=("Run().close", call()),
    ),
    ExpectedCalls(
        kind=tracking.MLflowTracker,
        modules=("mlflow", "mlflow.utils"),
        run="start_run()",
        started=(
            "start_run",
            call(run_id=None, experiment_id=7, run_name="n", nested=False, tags={"a": "b"}, description=None),
        ),
        stored=("log_params", call(CONFIG)),
        logged=[("log_metrics", call({"train_loss": 0.5, "epoch": 2.0}, step=3, commit=True))],
        finished=("end_run", call()),
        options={"run_name": "n", "tags": '{"a": "b"}'},
        takes_texts=False,
    ),
    ExpectedCalls(
        kind=tracking.ClearMLTracker,
        modules=("clearml",),
        run="Task.init()",
        started=("Task.init", call(project_name="proj", task_name="proj", tags=["one"])),
        stored=("Task.init().connect_configuration", call(CONFIG)),
        logged=[
            (
                "Task.init().get_logger().report_scalar",
                call(title="loss", series="train", value=0.5, iteration=3, commit=True),
            ),
            (
                "Task.init().get_logger().report_scalar",
                call(title="epoch", series="train", value=2.0, iteration=3, commit=True),
            ),
        ],
        finished=("Task.init().close", call()),
        takes_texts=False,
    ),
    ExpectedCalls(
        kind=tracking.DVCLiveTracker,
        modules=("dvclive", "dvclive.plots"),
        run="Live()",
        started=("Live", call(tags=["one"])),
        stored=("Live().log_params", call(CONFIG)),
        logged=[
            ("Live().log_metric", call("train_loss", 0.5, commit=True)),
            ("Live().log_metric", call("epoch", 2.0, commit=True)),
            ("Live().next_step", call()),
        ],
        finished=("Live().end", call()),
        takes_texts=False,
    ),
    ExpectedCalls(
        kind=tracking.TensorBoardTracker,
        modules=("torch.utils.tensorboard",),
        run="SummaryWriter()",
        started=("SummaryWriter", call(os.path.join("logs", "proj"), tags=["one"])),
        stored=("SummaryWriter().add_hparams", call(CONFIG, metric_dict={})),
        logged=[
            ("SummaryWriter().add_scalar", call("train_loss", 0.5, global_step=3, commit=True)),
            ("SummaryWriter().add_scalar", call("epoch", 2.0, global_step=3, commit=True)),
            ("SummaryWriter().add_text", call("note", "good", global_step=3, commit=True)),
        ],
        finished=("SummaryWriter().close", call()),
    ),
]


@pytest.fixture(params=EXPECTED, ids=lambda expected: expected.kind.name)
def expected(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[ExpectedCalls]:
    """Each adapter in turn, its library replaced by a recording fake, in an empty folder."""
    install_fake(monkeypatch, *request.param.modules)
    monkeypatch.chdir(tmp_path)
    yield request.param


def install_fake(monkeypatch: pytest.MonkeyPatch, *names: str) -> Any:
    """Put a module into sys.modules whose attributes record their calls; return the record of the first name."""
    record = MagicMock()
    record.Task.current_task.return_value = None  # clearml
    record.get_experiment_by_name.return_value.experiment_id = 7  # mlflow
    record.utils.validation.MAX_PARAM_VAL_LENGTH = 20
    record.utils.validation.MAX_PARAMS_TAGS_PER_BATCH = 2
    record.plots.Metric.could_log.side_effect = lambda value: isinstance(value, (int, float))  # dvclive
    for name in names:
        inner = record
        for part in name.removeprefix(names[0]).strip(".").split("."):
            inner = getattr(inner, part) if part else inner
        module = ModuleType(name)
        module.__getattr__ = lambda attribute, inner=inner: getattr(inner, attribute)  # type: ignore[method-assign,misc]
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    return sys.modules[names[0]]


def spied(expected: ExpectedCalls, path: str) -> Any:
    """Return what the fake library has at a path: `init().log` is the `log` of what `init` returned."""
    found: Any = sys.modules[expected.modules[0]]
    for part in path.split("."):
        found = getattr(found, part.removesuffix("()"))
        if part.endswith("()"):
            found = found.return_value
    return found


def make(expected: ExpectedCalls) -> Any:
    folder = ["logs"] if expected.kind.requires_logging_directory else []
    kind: Any = expected.kind
    return kind("proj", *folder, **expected.options)


def test_the_contract(expected: ExpectedCalls) -> None:
    """A run from start to end reaches the library as its documentation has it."""
    tracker = make(expected)
    assert not spied(expected, expected.started[0]).mock_calls, "made, but not started"
    tracker.start()
    assert spied(expected, expected.started[0]).call_args_list == [expected.started[1]]
    assert tracker.tracker is spied(expected, expected.run)
    tracker.store_init_configuration(CONFIG)
    assert spied(expected, expected.stored[0]).call_args_list == [expected.stored[1]]
    if expected.takes_texts:
        tracker.log(LOGGED, step=3, commit=True)
    else:
        with pytest.warns(UserWarning, match=f"{tracker.name} cannot log 'note': a str"):
            tracker.log(LOGGED, step=3, commit=True)
    for path in {path for path, _ in expected.logged}:
        wanted = [made for name, made in expected.logged if name == path]
        assert spied(expected, path).call_args_list == wanted
    finish = spied(expected, expected.finished[0])
    assert not finish.called
    tracker.finish()
    assert finish.call_args_list == [expected.finished[1]]


def test_the_kind_is_found_by_name_and_says_what_it_needs(expected: ExpectedCalls) -> None:
    kind = expected.kind
    assert tracking.tracker_class(kind.name) is kind
    assert isinstance(kind.requires_logging_directory, bool)
    assert kind.main_process_only == expected.main_process_only


def rank_calls(position: int) -> int:
    """Return how many calls reach the library in this rank."""
    from notebook_accel.state import PartialState

    expected = EXPECTED[position]
    os.chdir(os.environ["TMPDIR"])
    with pytest.MonkeyPatch.context() as patch:
        install_fake(patch, *expected.modules)
        PartialState(cpu=True)
        tracker = make(expected)
        tracker.start()
        return spied(expected, expected.started[0]).call_count


def all_rank_calls() -> list[int]:
    return [rank_calls(position) for position in range(len(EXPECTED))]


def test_only_rank_0_acts_where_the_tracker_is_for_the_main_process() -> None:
    first, second = run_ranks(all_rank_calls)
    assert first == [1] * len(EXPECTED)
    assert second == [0 if expected.main_process_only else 1 for expected in EXPECTED]


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_run_trackers_take_images(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = install_fake(monkeypatch, name)
    tracker: Any = tracking.tracker_class(name)("proj")
    tracker.start()
    tracker.log_images({"seen": ["a", "b"]}, step=1)
    assert library.Image.call_args_list == [call("a"), call("b")]
    assert library.init().log.call_args == call({"seen": [library.Image()] * 2}, step=1)


def test_wandb_takes_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    library = install_fake(monkeypatch, "wandb")
    tracker = tracking.WandBTracker("proj")
    tracker.start()
    tracker.log_table("sums", columns=["a"], data=[[1]], step=2)
    assert library.Table.call_args == call(columns=["a"], data=[[1]], dataframe=None)
    assert library.init().log.call_args == call({"sums": library.Table()}, step=2)


def test_aim_takes_images_with_captions(monkeypatch: pytest.MonkeyPatch) -> None:
    library = install_fake(monkeypatch, "aim")
    tracker = tracking.AimTracker("proj", "logs")
    tracker.start()
    tracker.log_images({"x": ("pixels", "a cat")}, 4, {"aim_image": {"quality": 9}, "track": {"epoch": 1}})
    assert library.Image.call_args == call("pixels", caption="a cat", quality=9)
    assert library.Run().track.call_args == call(library.Image(), name="x", step=4, epoch=1)
    assert library.Run().name == "proj"


def test_clearml_leaves_a_task_open_that_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    library = install_fake(monkeypatch, "clearml")
    task = library.Task.current_task.return_value = MagicMock()
    tracker = tracking.ClearMLTracker("proj")
    tracker.start()
    tracker.log({"eval_loss": 1, "train_": 2})
    tracker.finish()
    assert tracker.tracker is task
    assert not task.close.called and not library.Task.init.called
    logger = task.get_logger()
    assert logger.report_single_value.call_args_list == [
        call(name="eval_loss", value=1.0),
        call(name="train_", value=2.0),
    ]


def test_clearml_takes_tables_and_images(monkeypatch: pytest.MonkeyPatch) -> None:
    library = install_fake(monkeypatch, "clearml")
    monkeypatch.setenv("CLEARML_TASK", "named by the environment")
    tracker = tracking.ClearMLTracker("proj", project_name="given")
    tracker.start()
    assert library.Task.init.call_args == call(project_name="given", task_name="named by the environment")
    logger = library.Task.init().get_logger()
    tracker.log_table("test_sums", columns=["a"], data=[[1]], step=2)
    assert logger.report_table.call_args == call(
        title="sums", series="test", table_plot=[["a"], [1]], iteration=2
    )
    with pytest.raises(ValueError, match="neither data nor dataframe"):
        tracker.log_table("empty")
    tracker.log_images({"eval_x": ["p", "q"], "y": "r"}, step=1)
    assert logger.report_image.call_args_list == [
        call(title="x", series="eval_0", iteration=1, image="p"),
        call(title="x", series="eval_1", iteration=1, image="q"),
        call(title="y", series="train", iteration=1, image="r"),
    ]


def test_mlflow_makes_its_experiment_and_keeps_to_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    library = install_fake(monkeypatch, "mlflow", "mlflow.utils")
    library.get_experiment_by_name.return_value = None
    library.create_experiment.return_value = 9
    for name, text in {"EXPERIMENT_NAME": "by env", "TAGS": '{"t": "1"}', "NESTED_RUN": "1"}.items():
        monkeypatch.setenv(f"MLFLOW_{name}", text)
    tracker = tracking.MLflowTracker("proj", logging_dir=Path("there"))
    tracker.start()
    assert library.create_experiment.call_args == call(
        name="by env", artifact_location="there", tags={"t": "1"}
    )
    started = library.start_run.call_args.kwargs
    assert (started["experiment_id"], started["nested"], started["tags"]) == (9, True, {"t": "1"})
    with pytest.warns(UserWarning, match="'long': its text is longer than 20"):
        tracker.store_init_configuration({"a": 1, "long": "x" * 21, "b": 2, "c": 3})
    assert library.log_params.call_args_list == [call({"a": 1, "b": 2}), call({"c": 3})]
    tracker.log_figure("figure", "f.png", dpi=3)
    tracker.log_artifact("file", "below")
    tracker.log_artifacts("folder")
    assert library.log_figure.call_args == call(figure="figure", artifact_file="f.png", dpi=3)
    assert library.log_artifact.call_args == call(local_path="file", artifact_path="below")
    assert library.log_artifacts.call_args == call(local_dir="folder", artifact_path=None)


def test_tensorboard_for_real(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the tracker's library")
    events = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    tracker = tracking.TensorBoardTracker("proj", tmp_path, flush_secs=60)
    tracker.start()
    tracker.store_init_configuration({"lr": np.float32(0.5), "layers": [1, 2], "none": None, "on": True})
    tracker.log({"loss": torch.tensor(0.25), "note": "hello", "both": {"a": 1, "b": 2.0}}, step=3)
    tracker.log_images({"seen": [np.zeros((1, 2, 2), np.uint8)] * 2}, step=3)
    with pytest.warns(UserWarning, match="tensorboard cannot log 'odd': a object"):
        tracker.log({"odd": object()})
    tracker.finish()
    read = events.EventAccumulator(str(tmp_path / "proj"))
    read.Reload()
    assert [(point.step, point.value) for point in read.Scalars("loss")] == [(3, 0.25)]
    assert [image.step for image in read.Images("seen")] == [3]
    assert b"hello" in read.Tensors("note/text_summary")[0].tensor_proto.string_val[0]
    assert (tmp_path / "proj" / "both_b").is_dir()
    (stored,) = (tmp_path / "proj").glob("*/hparams.yml")
    assert yaml.safe_load(stored.read_text()) == {"lr": 0.5, "layers": [1, 2], "none": None, "on": True}


TRACKIO = """
import json, sqlite3, sys
from notebook_accel import Accelerator
accelerator = Accelerator(cpu=True, log_with="trackio")
accelerator.init_trackers("proj", {"lr": 0.5}, {"trackio": {"name": "first", "auto_log_cpu": False}})
for step in range(2):
    accelerator.log({"loss": 1 / (step + 1), "note": "good"}, step=step)
config = dict(accelerator.get_tracker("trackio", unwrap=True).config)
accelerator.end_training()
with sqlite3.connect(sys.argv[1] + "/proj.db") as store:
    rows = store.execute("select step, metrics from metrics order by step").fetchall()
print('read', json.dumps([config, [[step, bytes(metrics).decode()] for step, metrics in rows]]))
"""


def test_trackio_for_real(tmp_path: Path) -> None:
    """In a process of its own: it asks once, when imported, where to keep runs."""
    pytest.importorskip("trackio", reason="the tracker's library")
    command = [sys.executable, "-c", TRACKIO, str(tmp_path)]
    variables = {**os.environ, "TRACKIO_DIR": str(tmp_path), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("read ")]
    config, rows = json.loads(line.removeprefix("read "))
    assert config["lr"] == 0.5 and "allow_val_change" not in config
    logged = [(step, json.loads(metrics)) for step, metrics in rows]
    assert [(step, metrics["loss"], metrics["note"]) for step, metrics in logged] == [
        (0, 1.0, "good"),
        (1, 0.5, "good"),
    ]


def test_a_subclass_says_what_it_lacks() -> None:
    class Half(GeneralTracker):
        name = "half"

    with pytest.raises(NotImplementedError, match="Half does not define requires_logging_directory, tracker"):
        Half()


def test_a_silent_tracker_takes_every_call() -> None:
    silent: Any = SilentTracker("wandb")
    assert silent.log({"a": 1}) is None
    assert silent.log_images({}, step=1) is None
    assert silent.tracker.anything("at all") is None
    assert not hasattr(silent, "__fspath__")


def test_numbers() -> None:
    tensor = torch.tensor
    taken: list[Any] = [1, 2.5, True, tensor([3]), tensor(1.5), np.float32(0.5), np.int8(4), np.ones((1, 1))]
    assert [as_number(value) for value in taken] == [1.0, 2.5, 1.0, 3.0, 1.5, 0.5, 4.0, 1.0]
    assert all(type(as_number(value)) is float for value in taken)
    skipped: list[Any] = ["1", None, 1j, [1], tensor([1, 2]), tensor(1j), np.ones(2), np.str_("a"), 10**400]
    skipped += [torch.ones(1, device="meta"), np.datetime64("2020-01-01")]
    assert [as_number(value) for value in skipped] == [None] * len(skipped)
    assert numbers_in({"a": 1, "b": "text", 3: tensor(2)}) == {"a": 1.0, "3": 2.0}  # type: ignore[dict-item]


def test_plain_values() -> None:
    given = {"a": (1, np.int64(2), torch.tensor(3)), "b": {"c": None, "d": Path("x")}, "e": np.float32(0.5)}
    assert plain(given) == {"a": [1, 2, 3], "b": {"c": None, "d": "x"}, "e": 0.5}


def test_a_folder_of_runs_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb writes to a folder `wandb` beside the notebook, which Python would import as an empty package."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("only_a_folder", "a_library"):
        (tmp_path / name).mkdir()
    (tmp_path / "a_library" / "__init__.py").touch()
    assert probes.is_available("a_library")
    assert not probes.is_available("only_a_folder")
