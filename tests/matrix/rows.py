"""The environments that the package is tried in: a Python, a torch, and what else is there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packaging.utils import canonicalize_name

IMAGES: Final = Path(__file__).parent / "images"

_UNIT: Final = ("tests/unit",)
_LAUNCHES: Final = ("tests/notebooks", "tests/contract")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """An environment and what runs in it.

    Attributes:
        name: of the row, its folder and its line in the table.
        python: the version, such as `3.12`.
        torch: the version; None for the newest.
        image: a list in `images` of what is there before this package is installed.
        constraints: a file of versions for everything else; without, the newest are taken.
        lowest: whether each package is the oldest that the bounds allow.
        extras: of this package.
        beside: what else the tests need. It is installed after it was seen that the package replaces nothing.
        instead: versions that take the place of others at the end, whatever asks for those.
        tests: folders and files for pytest.
    """

    name: str
    python: str
    torch: str | None
    image: str | None = None
    constraints: str | None = None
    lowest: bool = False
    extras: tuple[str, ...] = ("test",)
    beside: tuple[str, ...] = ("accelerate==1.15.0", "transformers>=5")
    instead: tuple[str, ...] = ()
    tests: tuple[str, ...] = (*_UNIT, *_LAUNCHES)


ROWS: Final = (
    Row(name="python-3.10", python="3.10", torch="2.8.0"),
    Row(
        name="kaggle-tpu",
        python="3.12",
        torch="2.8.0",
        image="kaggle_tpu",
        tests=(*_UNIT, *_LAUNCHES, "tests/xla"),
    ),
    Row(name="colab", python="3.13", torch="2.11.0", image="colab"),
    Row(
        name="colab-tpu",
        python="3.13",
        torch="2.9.0",
        image="colab_tpu",
        tests=(*_UNIT, *_LAUNCHES, "tests/xla"),
    ),
    Row(name="kaggle", python="3.12", torch="2.10.0", image="kaggle"),
    Row(name="python-3.14", python="3.14", torch=None),
    Row(name="newest", python="3.11", torch=None, extras=("test", "compare")),
    Row(
        name="lowest",
        python="3.10",
        torch="2.8.0",
        lowest=True,
        beside=("accelerate==1.15.0",),
        # the last that takes the lowest packaging: torch's compiler imports it, and what is built is tested elsewhere
        instead=("setuptools==76.1.0",),
    ),
)


def read_image(name: str) -> dict[str, str]:
    """Return the versions of an image by the names of what is installed.

    Args:
        name: of the list, without its ending.
    """
    lines = (IMAGES / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(package): version for package, version in pairs}
