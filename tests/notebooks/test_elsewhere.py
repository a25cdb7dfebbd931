"""What this package believes to run on, where `make test-elsewhere` says another system."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import elsewhere
from tests.notebooks.kernel import ROOT

pytestmark = [pytest.mark.once, pytest.mark.skipif(sys.platform != "linux", reason="pretends from Linux")]
LOOK = """
from notebook_accel.launch.supervise import end_watch, starting
from notebook_accel.launch import signals
import multiprocessing, os, sys
lacks = [name for name in ("pidfd_open", "fork") if not hasattr(end_watch.os, name)]
print(starting.OUTPUT_BY_PIPES, signals.STACK_SIGNAL is None, lacks, multiprocessing.get_start_method())
assert sys.platform == "linux" and hasattr(os, "fork"), "libraries find what they know"
"""


@pytest.mark.parametrize(
    ("system", "found"),
    [("darwin", "True True ['pidfd_open'] spawn"), ("win32", "False True ['pidfd_open', 'fork'] spawn")],
)
def test_modules_believe_in_it_and_libraries_do_not(system: str, found: str) -> None:
    path = os.pathsep.join(map(str, (ROOT, elsewhere.STARTUP)))
    own = {**os.environ, "PYTHONPATH": path, elsewhere.VARIABLE: system}
    done = subprocess.run([sys.executable, "-c", LOOK], env=own, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == found, done.stderr
