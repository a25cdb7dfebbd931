"""Classes of tests that leave no state behind, and checks of what a call raises and prints."""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
import unittest
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ..gradient_state import GradientState
from ..state import AcceleratorState


class AccelerateTestCase(unittest.TestCase):
    """Tests after each of which this process has no accelerator any more."""

    def tearDown(self) -> None:
        """Remove the state."""
        super().tearDown()
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


class TempDirTestCase(unittest.TestCase):
    """Tests that share a folder, `tmpdir`, which is removed after the last one.

    Attributes:
        clear_on_setup: whether each test begins with an empty folder.
        tmpdir: the folder.
    """

    clear_on_setup: ClassVar[bool] = True
    tmpdir: ClassVar[Path]

    @classmethod
    def setUpClass(cls) -> None:
        """Make the folder."""
        cls.tmpdir = Path(tempfile.mkdtemp())

    @classmethod
    def tearDownClass(cls) -> None:
        """Remove the folder."""
        shutil.rmtree(cls.tmpdir, ignore_errors=True)

    def setUp(self) -> None:
        """Empty the folder."""
        for path in list(self.tmpdir.iterdir()) if self.clear_on_setup else []:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


class MockingTestCase(unittest.TestCase):
    """Tests with mocks that `setUp` makes.

    Attributes:
        mocks: those of this test.
    """

    mocks: Sequence[Any]

    def add_mocks(self, mocks: Any) -> None:
        """Start mocks, which stop after the test.

        Args:
            mocks: what `unittest.mock.patch` returns, one or a list.
        """
        self.mocks = mocks if isinstance(mocks, (list, tuple)) else [mocks]
        for mock in self.mocks:
            mock.start()
            self.addCleanup(mock.stop)


@contextlib.contextmanager
def assert_exception(exception_class: type[Exception], msg: str | None = None) -> Iterator[None]:
    """Check that the block raises an exception.

    Args:
        exception_class: its class.
        msg: a part of its message.

    Raises:
        AssertionError: it raises nothing, or something else.
    """
    wanted = exception_class.__name__ + (f" with {msg!r}" if msg is not None else "")
    try:
        yield
    except Exception as error:
        if isinstance(error, exception_class) and (msg is None or msg in str(error)):
            return
        raise AssertionError(f"{type(error).__name__} was raised ({error}), expected {wanted}") from error
    raise AssertionError(f"nothing was raised, expected {wanted}")


def capture_call_output(func: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Call a function, and return what it prints.

    Args:
        func: the function.
        args: for it.
        kwargs: for it.
    """
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        func(*args, **kwargs)
    return printed.getvalue()
