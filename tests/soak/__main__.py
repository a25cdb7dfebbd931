"""Launches, sessions, interrupts, kills and relaunches at random, until something leaks, hangs or is wrong.

python -m tests.soak --minutes 60             # a new seed, which it prints first
python -m tests.soak --seed 7 --only 41       # one step again
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.soak.steps import Soak, SoakError

_APART = "NA_SOAK_APART"


def _read_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--seed", type=int, help="of all that is drawn; a new one where it is left out")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no step begins")
    parser.add_argument("--steps", type=int, default=sys.maxsize, help="how many")
    parser.add_argument("--only", type=int, metavar="STEP", help="make one step alone, in fresh processes")
    parser.add_argument("--times", type=int, default=1, help="how often, with --only")
    return parser.parse_args(words)


def _go_apart() -> None:
    """Get shared memory of one's own, where other programs leave nothing."""
    command = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$0" "$@"']
    has_own = os.geteuid() == 0 and shutil.which("unshare") is not None
    if _APART in os.environ or not has_own or subprocess.run([*command, "true"], check=False).returncode:
        return
    os.environ[_APART] = "1"
    os.execvp(command[0], [*command, sys.executable, "-m", "tests.soak", *sys.argv[1:]])


def main(words: Sequence[str] | None = None) -> int:
    """Make steps; return 1 where one of them found something."""
    asked = _read_arguments(words)
    seed = random.SystemRandom().randrange(1_000_000) if asked.seed is None else asked.seed
    print(f"seed {seed}", flush=True)
    if asked.only is None:
        numbers: Sequence[int] = range(asked.steps)
    else:
        numbers = [asked.only] * asked.times
    end = time.monotonic() + asked.minutes * 60
    number = -1
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="na-soak-", ignore_cleanup_errors=True)
        )
        try:
            soak = stack.enter_context(contextlib.closing(Soak(seed, Path(folder))))
            for number in numbers:
                if time.monotonic() > end:
                    break
                soak.make_step(number)
            print(soak.describe(), flush=True)
        except SoakError as error:
            print(f"seed {seed}, step {number}:\n{error}", flush=True)
            print(f"again: python -m tests.soak --seed {seed} --only {number}", flush=True)
            return 1
    return 0


if __name__ == "__main__":
    _go_apart()
    sys.exit(main())
