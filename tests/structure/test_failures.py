"""What `make test` tells last."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.failures import find_failures

TESTS = """
import pytest

@pytest.fixture
def breaks():
    yield
    raise OSError("as it ends")

def test_passes(): pass
def test_fails(): assert {"a": 1}["a"] == 2, "told\\nin lines"
def test_breaks(breaks): pass
@pytest.mark.skip
def test_skips(): pass
"""


def test_each_failure_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    words = ["-p", "no:cacheprovider", "--junitxml=reports/some.xml", "test_some.py"]
    subprocess.run([sys.executable, "-m", "pytest", *words], cwd=tmp_path, check=False, capture_output=True)
    (tmp_path / "reports" / "torn.xml").write_text("<testsuites>")
    failed, broken, torn = find_failures(tmp_path / "reports")
    assert failed.startswith("test_some::test_fails (0.") and "told in lines assert 1 == 2" in failed
    assert broken.startswith("test_some::test_breaks (") and "as it ends" in broken
    assert torn.startswith("torn.xml: ")
