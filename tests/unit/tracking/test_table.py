"""Trackers by name: the rows of our adapters, and trackers that an installed package offers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from notebook_accel import Accelerator
from notebook_accel.tracking import GeneralTracker, LoggerType, choose_trackers, register_tracker_class, table

MINE = """
from notebook_accel.tracking import GeneralTracker

class Mine(GeneralTracker):
    name = "mine"
    requires_logging_directory = True

    def __init__(self, project, folder, **options):
        self.tracker = [(project, str(folder), options)]
        super().__init__()

    def log(self, values, step=None, **kwargs):
        self.tracker.append((values, step))
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a package `tracks` with a module of the given code, as pip leaves it in a folder of the path."""
    site = tmp_path / "site"

    def installing(code: str, **trackers: str) -> None:
        info = site / "tracks-1.2.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tracks\nVersion: 1.2\n")
        rows = "".join(f"{name} = {value}\n" for name, value in trackers.items())
        (info / "entry_points.txt").write_text(f"[{table.GROUP}]\n{rows}")
        (site / "tracks.py").write_text(code)
        monkeypatch.syspath_prepend(str(site))

    yield installing
    sys.modules.pop("tracks", None)


@pytest.mark.usefixtures("clean_runtime")
def test_a_package_can_add_a_tracker(install: Install, tmp_path: Path) -> None:
    install(MINE, mine="tracks:Mine")
    assert "mine" in table.names() and "mine" in table.installed_names()
    with pytest.raises(ValueError, match="'mine' writes files: give the Accelerator a project_dir"):
        Accelerator(cpu=True, log_with="mine")
    accelerator = Accelerator(cpu=True, log_with=["mine"], project_dir=tmp_path)
    accelerator.init_trackers("proj", init_kwargs={"mine": {"colour": "red"}})
    accelerator.log({"loss": 0.5}, step=3, log_kwargs={"mine": {}})
    assert accelerator.get_tracker("mine", unwrap=True) == [
        ("proj", str(tmp_path), {"colour": "red"}),
        ({"loss": 0.5}, 3),
    ]


def test_all_includes_trackers_of_packages(install: Install, tmp_path: Path) -> None:
    assert "mine" not in choose_trackers("all", tmp_path)
    install(MINE, mine="tracks:Mine")
    assert "mine" in choose_trackers("all", tmp_path)


def test_a_registered_class_comes_before_that_of_a_package(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GeneralTracker, "_registered", {})
    own = type("Own", (GeneralTracker,), {"name": "mine", "requires_logging_directory": False})
    install(MINE, mine="tracks:Mine", wandb="tracks:Mine")
    register_tracker_class(own)
    assert table.tracker_class("mine") is own
    assert table.tracker_class("wandb").__module__ == "notebook_accel.tracking.runs"


def test_an_unknown_name_gets_the_choices_and_the_nearest(install: Install) -> None:
    install(MINE, mine="tracks:Mine")
    with pytest.raises(
        ValueError, match=r"tracker 'mien' is unknown, choose among all, aim, .*mine; did you mean"
    ):
        choose_trackers("mien", None)
    with pytest.raises(ValueError, match=r"did you mean 'tensorboard'\?"):
        choose_trackers("tensorbord", None)
    with pytest.raises(ValueError, match=r"unknown, choose among [^;]* \(a class of your own"):
        choose_trackers("zzzzzz", None)


@pytest.mark.parametrize(
    ("code", "value", "problem"),
    [
        (
            "import no_such_library",
            "tracks:Mine",
            r"cannot be imported: ModuleNotFoundError\(.*no_such_library",
        ),
        ("", "tracks:Mine", r"cannot be imported: AttributeError\("),
        ("Mine = 3", "tracks:Mine", "is no tracker: a tracker has to be a subclass of GeneralTracker, not 3"),
        (
            MINE.replace('"mine"', '"theirs"'),
            "tracks:Mine",
            "whose name is 'theirs': the entry point needs the",
        ),
        (
            MINE.replace("requires_logging_directory = True", ""),
            "tracks:Mine",
            "is no tracker: Mine lacks requires_logging_directory",
        ),
    ],
)
def test_a_broken_one_is_named_with_its_package(
    install: Install, code: str, value: str, problem: str
) -> None:
    install(code, mine=value)
    with pytest.raises(
        ValueError, match=rf"tracker 'mine': the package tracks 1\.2 offers {value}, .*{problem}"
    ):
        choose_trackers("mine", None)
    assert choose_trackers("tensorboard", "logs") == ["tensorboard"], "the others are as before"


@pytest.mark.parametrize("name", table.BUILT_IN)
def test_each_row_has_a_class_that_keeps_the_contract(name: str) -> None:
    kind: Any = table.tracker_class(name)
    assert (kind.name, isinstance(kind.requires_logging_directory, bool)) == (name, True)
    for method in ("start", "store_init_configuration", "log", "finish", "tracker"):
        assert getattr(kind, method, None) is not getattr(GeneralTracker, method, None), (
            f"{kind} has no {method}"
        )
    made = kind("proj", *(["logs"] if kind.requires_logging_directory else []))
    assert isinstance(made, GeneralTracker), "made without its library, which `start` needs first"


def test_accelerates_names_are_rows() -> None:
    assert [name for name in LoggerType.list() if name != table.ALL] == list(table.BUILT_IN)[:9]


@pytest.mark.usefixtures("clean_runtime")
def test_all_leaves_out_what_cannot_be_used(install: Install, tmp_path: Path) -> None:
    install(MINE, mine="tracks:Mine", broken="tracks:Absent")
    with pytest.warns(
        UserWarning, match=r"log_with='all' leaves one out: tracker 'broken': the package tracks 1.2"
    ):
        accelerator = Accelerator(cpu=True, log_with="all", project_dir=tmp_path)
    assert "mine" in accelerator.log_with and "broken" not in accelerator.log_with
