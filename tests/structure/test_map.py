"""The map in CONTRIBUTING.md names modules that exist, also where it describes a package."""

from __future__ import annotations

import re

from tests.structure.source import ROOT, modules

# what the map names besides modules
OTHERS = {"log_with", "notebook_launcher"}


def test_descriptions_name_modules_of_their_package() -> None:
    names = {module.name.partition(".")[2] for module in modules()}
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = text.partition("<!-- map -->")[2].partition("<!-- end of map -->")[0].splitlines()
    stale = []
    for cells in (row.split("|") for row in rows if row.startswith("|")):
        package = re.match(r" `([\w/]+)/`", cells[2])
        for word in re.findall(r"`([a-z_]\w*)`", cells[3]) if package else []:
            inside = f"{package[1].replace('/', '.')}.{word}" if package else ""
            if not {word, inside} & (names | OTHERS):
                stale.append(f"{inside}: no such module")
    assert not stale, stale


def test_all_others_are_named() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert not [name for name in OTHERS if f"`{name}`" not in text]
