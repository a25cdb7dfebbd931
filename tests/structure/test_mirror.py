"""`tests/unit` has the tree of the package: a folder for each package, a file for each module that it tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.structure.source import ROOT, find_mirrored, modules

UNIT = ROOT / "tests" / "unit"
# files that test no module by its name, and why
EXCEPTIONS = {
    "test_multiprocess.py": "tests `multiprocess.py` beside it, which runs the ranks of the other tests",
}


def known_names() -> set[str]:
    """Return the names of all modules and packages below `notebook_accel`."""
    return {module.name.partition(".")[2] for module in modules()}


def test_each_file_is_named_after_what_it_tests() -> None:
    names = known_names()
    files = [path.relative_to(UNIT) for path in UNIT.rglob("test_*.py")]
    strangers = [str(path) for path in files if not find_mirrored(path, names)]
    extra = sorted(set(strangers) - set(EXCEPTIONS))
    assert not extra, f"no module has the name of these files, say why in EXCEPTIONS or rename them: {extra}"
    assert set(EXCEPTIONS) <= set(strangers), "EXCEPTIONS lists a file that is gone or mirrors a module"


def test_each_folder_is_a_package() -> None:
    packages = {module.name.partition(".")[2] for module in modules() if module.is_package}
    folders = {path.relative_to(UNIT).parent for path in UNIT.rglob("*.py")}
    named = {".".join(folder.parts) for folder in folders}
    assert not named - packages, f"folders of tests/unit that no package has: {sorted(named - packages)}"


@pytest.mark.parametrize(
    ("path", "mirrored"),
    [
        ("test_seeding.py", True),
        ("test_fsdp_plugin.py", True),  # `fsdp`, in one of several files
        ("launch/test_preflight.py", True),
        ("launch/transfer/test_transfer.py", True),  # its modules together
        ("test_ship.py", False),
        ("test_preflight.py", False),  # its module is in a package
        ("launch/test_pickling.py", False),
    ],
)
def test_what_mirrors(path: str, mirrored: bool) -> None:
    assert bool(find_mirrored(Path(path), known_names())) is mirrored
