"""Tells at the end of `make test` what failed in all lanes: their own words stand far above.

    python -m tests.failures build/reports

reads the reports that pytest wrote there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

WIDTH = 300
"""Characters of each message that are shown."""


def find_failures(folder: Path) -> Iterator[str]:
    """Yield a line for each test of the reports that failed, and for each report that is broken off."""
    for path in sorted(folder.glob("*.xml")):
        try:
            report = ElementTree.parse(path)
        except ElementTree.ParseError as error:
            yield f"{path.name}: {error}"
            continue
        for case in report.iter("testcase"):
            for end in (*case.iter("failure"), *case.iter("error")):
                said = " ".join(end.get("message", "").split())
                yield f"{case.get('classname')}::{case.get('name')} ({case.get('time')} s): {said}"[:WIDTH]


def main(folder: str) -> None:
    """Print what failed, if anything has."""
    failures = list(find_failures(Path(folder)))
    if failures:
        print(f"\n== {len(failures)} failed in all lanes:")
        print("\n".join(failures))


if __name__ == "__main__":
    main(*sys.argv[1:])
