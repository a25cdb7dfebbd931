"""Test cases and checks that libraries' tests take."""

from __future__ import annotations

import unittest
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
from accelerate.test_utils import testing as reference

from notebook_accel import environ
from notebook_accel.state import AcceleratorState, PartialState
from notebook_accel.utils import testing_cases


def run(case: type[unittest.TestCase]) -> None:
    outcome = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(outcome)
    assert outcome.testsRun and outcome.wasSuccessful(), outcome.failures + outcome.errors


@pytest.mark.usefixtures("clean_runtime")
def test_each_test_begins_without_a_state() -> None:
    class Case(testing_cases.AccelerateTestCase):
        def test_one(self) -> None:
            self.assertFalse(AcceleratorState._shared_state)
            PartialState(cpu=True)

        test_two = test_one

    run(Case)
    assert not PartialState._shared_state


@pytest.mark.parametrize("clear", [True, False])
def test_a_folder_for_all_tests(clear: bool) -> None:
    seen: list[list[str]] = []
    folders: set[Path] = set()

    class Case(testing_cases.TempDirTestCase):
        clear_on_setup: ClassVar[bool] = clear

        def test_one(self) -> None:
            seen.append(sorted(path.name for path in self.tmpdir.iterdir()))
            (self.tmpdir / "folder" / "inner").mkdir(parents=True, exist_ok=True)
            (self.tmpdir / "file").write_text("a")
            folders.add(self.tmpdir)

        test_two = test_one

    run(Case)
    assert seen == [[], [] if clear else ["file", "folder"]]
    assert len(folders) == 1 and not next(iter(folders)).exists()


def test_mocks_last_for_one_test() -> None:
    class Case(testing_cases.MockingTestCase):
        def setUp(self) -> None:
            super().setUp()
            self.add_mocks(mock.patch.dict("os.environ", {"TRIED": "1"}))

        def test_one(self) -> None:
            self.assertEqual(environ.snapshot()["TRIED"], "1")

    run(Case)
    assert "TRIED" not in environ.snapshot()


@pytest.mark.parametrize("side", [testing_cases, reference])
def test_what_a_block_raises(side: Any) -> None:
    with side.assert_exception(ValueError):
        raise ValueError("a b")
    with side.assert_exception(ValueError, "a"):
        raise ValueError("a b")
    with pytest.raises(AssertionError), side.assert_exception(ValueError, "c"):
        raise ValueError("a b")
    with pytest.raises(AssertionError), side.assert_exception(ValueError):
        raise TypeError("a b")
    with pytest.raises(AssertionError), side.assert_exception(ValueError):
        pass
    with pytest.raises(KeyboardInterrupt), side.assert_exception(ValueError):
        raise KeyboardInterrupt


def test_what_a_call_prints() -> None:
    assert testing_cases.capture_call_output(print, "a", "b", sep="-") == "a-b\n"
