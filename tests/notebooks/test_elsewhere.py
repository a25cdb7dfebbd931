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
from notebook_accel.launch.supervise import local_group
from notebook_accel.launch import signals
import multiprocessing, os, sys
lacks = [name for name in ("pidfd_open", "fork") if not hasattr(local_group.os, name)]
print(signals.STACK_SIGNAL is None, lacks, multiprocessing.get_start_method())
assert sys.platform == "linux" and hasattr(os, "fork"), "libraries find what they know"
"""


def test_modules_believe_in_it_and_libraries_do_not() -> None:
    path = os.pathsep.join(map(str, (ROOT, elsewhere.STARTUP)))
    own = {**os.environ, "PYTHONPATH": path, elsewhere.VARIABLE: "darwin"}
    done = subprocess.run([sys.executable, "-c", LOOK], env=own, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "True ['pidfd_open'] spawn", done.stderr
