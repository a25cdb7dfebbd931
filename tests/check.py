"""Runs the tests that matter for the change at hand, the nearest first, until its time is up: `make check`.

The change is all that differs from where the branch left `main`, what is not committed included. What is left out for
want of time is skipped and counted. `make test` runs everything.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.structure.affected import rank_tests
from tests.structure.source import ROOT

ALWAYS = ("tests/structure", "tests/contract/test_engines.py::test_ranks_are_one_run[fork]")
"""The rules of the code, and one launch of two processes from a kernel."""
BASES = ("origin/main", "main", "@{upstream}")
SECONDS = 110.0
"""After that no further test starts: with the one that runs, and with lint beside, three minutes are enough."""
MOST_FILES = 60
"""More are not collected: their tests would not get a turn."""


class Deadline:
    """Brings tests into the order of their distance from the change, slow ones last, and skips what comes too late.

    Args:
        distances: of the files of tests; those without one always run, after those of what has changed itself.
        end: in the time of `time.monotonic`.
    """

    def __init__(self, distances: Mapping[Path, int], end: float) -> None:
        self._distances = distances
        self._end = end

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        def place(item: pytest.Item) -> tuple[float, bool]:
            return self._distances.get(item.path, 0.5), item.get_closest_marker("slow") is not None

        items.sort(key=place)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if item.path in self._distances and time.monotonic() > self._end:
            pytest.skip("no time is left for it: make test")


def ask_git(*words: str) -> list[str]:
    """Return the lines that git answers; none where it fails."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


def find_changes(base: str | None) -> set[Path]:
    """Return the files that differ from where this branch left `base`, those that git does not know yet included.

    Args:
        base: a branch or commit; by default the first of `BASES` that there is, or else the last commit.

    Raises:
        ValueError: git does not know `base`.
    """
    merge_base = [
        found for name in ([base] if base else BASES) for found in ask_git("merge-base", "HEAD", name)
    ]
    if base and not merge_base:
        raise ValueError(f"{base!r} is no commit that this branch comes from")
    changed = ask_git("diff", "--name-only", (merge_base or ["HEAD"])[0])
    unknown = ask_git("ls-files", "--others", "--exclude-standard")
    return {path for name in (*changed, *unknown) if not (path := ROOT / name).is_dir()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", help="branch or commit to compare with; main by default")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="after which no further test starts")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    changed = find_changes(arguments.base)
    distances = {
        path: distance for path, distance in rank_tests(changed).items() if path.parent.name != "structure"
    }
    files = sorted(distances, key=lambda path: (distances[path], path))
    print(f"== {len(changed)} files changed, which {len(files)} files of tests have to do with", flush=True)
    names = [str(path.relative_to(ROOT)) for path in files[:MOST_FILES]]
    return int(pytest.main([*ALWAYS, *names, "--durations=5"], plugins=[Deadline(distances, end)]))


if __name__ == "__main__":
    sys.exit(main())
