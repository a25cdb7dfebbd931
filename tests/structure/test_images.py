"""Installing this package replaces nothing of what hosted notebooks have: every bound allows their versions.

The lists in `tests/matrix/images` have the versions that were seen there.
"""

from __future__ import annotations

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.matrix.rows import IMAGES, read_image
from tests.structure.source import ROOT

tomllib = pytest.importorskip("tomllib", reason="it came with Python 3.11")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = ("tutorial", "stateful", "notebook-test", "test")  # make sense there
NAMES = sorted(path.stem for path in IMAGES.glob("*.txt"))
OWN = "notebook-accel"


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


@pytest.mark.parametrize("image", NAMES)
@pytest.mark.parametrize("extra", ["dependencies", *EXTRAS])
def test_nothing_is_replaced(image: str, extra: str) -> None:
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


@pytest.mark.parametrize("image", NAMES)
def test_its_python_is_allowed(image: str) -> None:
    assert Requirement(f"python{PROJECT['requires-python']}").specifier.contains(read_image(image)["python"])


@pytest.mark.parametrize("image", [name for name in NAMES if name.endswith("tpu")])
def test_torch_xla_comes_with_the_torch_that_it_is_built_for(image: str) -> None:
    """The extra `xla` replaces nothing where both are there."""
    there = read_image(image)
    for one in read_requirements("xla"):
        assert one.specifier.contains(there[canonicalize_name(one.name)]), one
