"""get_logger: which ranks log, in which order, at which level."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notebook_accel import runtime
from notebook_accel.logging import get_logger
from notebook_accel.state import PartialState
from tests.unit.multiprocess import run_ranks

pytestmark = pytest.mark.usefixtures("clean_runtime")


@pytest.fixture
def name() -> Iterator[str]:
    """The name of a logger of the test's own; the root logger's level is given back."""
    name, root = "test_logging.own", logging.root.level
    yield name
    logging.root.setLevel(root)
    logging.Logger.manager.loggerDict.pop(name)


def ranks_log(folder: str) -> None:
    """Log to one file from all ranks; later ranks are quicker."""
    own = logging.getLogger("ranks")
    own.propagate = False
    own.setLevel("INFO")
    own.addHandler(logging.FileHandler(Path(folder, "log")))
    state = PartialState(cpu=True)
    waits = Waits(0.1 * (state.num_processes - state.process_index))
    runtime.set_reporter(waits)
    logger = get_logger("ranks")
    logger.info("main %s", "only")
    logger.info("never", main_process_only=True)
    state.wait_for_everyone()
    for turn in range(2):
        time.sleep(waits.seconds)
        logger.info("turn %d", turn, in_order=True)
    logger.debug("hidden in order", in_order=True)
    logger.info("everyone", main_process_only=False)
    state.wait_for_everyone()
    logger.info("in order wins", main_process_only=True, in_order=True)
    assert waits.flushed == 3, "the notebook has each message before the next rank's"


class Waits:
    """Stands for the way to the notebook."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.flushed = 0

    def metrics(self, values: Any, step: int | None) -> None:
        raise AssertionError("a message is no metric")

    def flush(self) -> None:
        self.flushed += 1


def test_ranks_and_their_order(tmp_path: Path) -> None:
    run_ranks(ranks_log, str(tmp_path))
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[:6] == [
        "[RANK 0] main only",
        "[RANK 0] never",
        "[RANK 0] turn 0",
        "[RANK 1] turn 0",
        "[RANK 0] turn 1",
        "[RANK 1] turn 1",
    ]
    assert sorted(lines[6:8]) == ["[RANK 0] everyone", "[RANK 1] everyone"]
    assert lines[8:] == ["[RANK 0] in order wins", "[RANK 1] in order wins"]


def test_there_has_to_be_a_rank(name: str) -> None:
    logger = get_logger(name)
    with pytest.raises(RuntimeError, match=r"make a PartialState\(\) or Accelerator\(\) before"):
        logger.warning("too early")
    with pytest.raises(RuntimeError):
        logger.warning_once("too early")


def test_a_message_comes_from_where_it_was_logged(name: str, caplog: pytest.LogCaptureFixture) -> None:
    PartialState(cpu=True)
    logger = get_logger(name)
    logger.warning("here")
    logger.log(logging.WARNING, "and %s", "here")
    logger.warning_once("once")
    by_another(logger)
    names = [(record.filename, record.funcName, record.getMessage()) for record in caplog.records]
    here = ("test_logging.py", "test_a_message_comes_from_where_it_was_logged")
    assert names == [
        (*here, "[RANK 0] here"),
        (*here, "[RANK 0] and here"),
        (*here, "[RANK 0] once"),
        ("test_logging.py", "by_another", "[RANK 0] mine"),
    ]


def by_another(logger: Any) -> None:
    logger.error("mine")


def test_warning_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger(name)
    with pytest.raises(RuntimeError):
        logger.warning_once("a %s", [1])
    PartialState(cpu=True)
    for _ in range(3):
        logger.warning_once("a %s", [1])
        logger.warning_once("a %s", [2], main_process_only=False)
    assert [record.getMessage() for record in caplog.records] == ["[RANK 0] a [1]", "[RANK 0] a [2]"]


def test_levels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.root.level
    monkeypatch.delenv("ACCELERATE_LOG_LEVEL", raising=False)
    assert (get_logger(name).logger.level, logging.root.level) == (logging.NOTSET, root)
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "error")
    assert (get_logger(name).logger.level, logging.root.level) == (logging.ERROR, logging.ERROR)
    assert get_logger(name, log_level="debug").logger.level == logging.DEBUG
    assert logging.root.level == logging.DEBUG
    with pytest.raises(ValueError, match="log_level 'loud' is no level, choose among CRITICAL, ERROR"):
        get_logger(name, "loud")
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "loud")
    with pytest.raises(ValueError, match="ACCELERATE_LOG_LEVEL 'loud' is no level"):
        get_logger(name)
    assert logging.root.level == logging.DEBUG


def test_records_name_the_line_of_the_call(name: str, caplog: pytest.LogCaptureFixture) -> None:
    class Outer(logging.LoggerAdapter):  # type: ignore[type-arg]
        """As some libraries wrap one: level 1 is our `log`, 2 its caller, 3 this class's caller."""

        def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
            self.logger.log(level, msg, *args, stacklevel=3, **kwargs)

    PartialState(cpu=True)
    logger = get_logger(name)
    logger.warning("plain")
    logger.warning_once("once")
    Outer(logger, {}).warning("wrapped")  # type: ignore[arg-type]
    found = [(record.filename, record.funcName) for record in caplog.records]
    assert found == [("test_logging.py", "test_records_name_the_line_of_the_call")] * 3
