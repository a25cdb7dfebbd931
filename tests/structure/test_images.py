"""Installing this package replaces nothing of what hosted notebooks have: every bound allows their versions.

The lists in `images` have the versions that were seen there.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.structure.source import ROOT

tomllib = pytest.importorskip("tomllib", reason="it came with Python 3.11")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
IMAGES = sorted((Path(__file__).parent / "images").glob("*.txt"))
EXTRAS = ("tutorial", "stateful", "notebook-test", "test")  # make sense there
OWN = "notebook-accel"


def read_image(path: Path) -> dict[str, str]:
    """Return the versions of an image by the names of what is installed."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def read_requirements(name: str) -> list[Requirement]:
    """Return what an extra asks for, or the package itself."""
    lines = PROJECT["dependencies"] if name == "dependencies" else PROJECT["optional-dependencies"][name]
    return [Requirement(line) for line in lines]


def list_requirements(extra: str) -> list[Requirement]:
    """Return what an extra asks for, with that of the extras in it."""
    own = read_requirements(extra)
    inside = [name for one in own if one.name == OWN for name in one.extras]
    return [
        *(one for one in own if one.name != OWN),
        *(one for name in inside for one in list_requirements(name)),
    ]


@pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.stem)
@pytest.mark.parametrize("extra", ["dependencies", *EXTRAS])
def test_nothing_is_replaced(image: Path, extra: str) -> None:
    there = read_image(image)
    wrong = [
        f"{one} replaces {there[name]}"
        for one in list_requirements(extra)
        if (name := canonicalize_name(one.name)) in there
        and not one.specifier.contains(there[name], prereleases=True)
    ]
    assert not wrong


def test_the_test_extra_brings_no_library_of_accelerators() -> None:
    """What an image has of these is its own choice, and fits its torch."""
    names = {canonicalize_name(one.name) for one in list_requirements("test")}
    assert not names & {"accelerate", "torchao", "transformers", "bitsandbytes", "torch-xla"}


@pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.stem)
def test_its_python_is_allowed(image: Path) -> None:
    assert Requirement(f"python{PROJECT['requires-python']}").specifier.contains(read_image(image)["python"])


@pytest.mark.parametrize(
    "image", [path for path in IMAGES if path.stem.endswith("tpu")], ids=lambda p: p.stem
)
def test_torch_xla_comes_with_the_torch_that_it_is_built_for(image: Path) -> None:
    """The extra `xla` replaces nothing where both are there."""
    there = read_image(image)
    for one in read_requirements("xla"):
        assert one.specifier.contains(there[canonicalize_name(one.name)]), one
