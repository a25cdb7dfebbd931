"""What `pyproject.toml` cannot say: a file beside the package, and the links of the description on PyPI."""

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PTH = 'import os; os.environ.get("NOTEBOOK_ACCEL_AS_ACCELERATE") and __import__("notebook_accel")\n'
HOME = "https://github.com/notebook-accel/notebook-accel"
RELATIVE = r"(?!#|[a-z]+:)"
LINK = re.compile(rf"(\]\(){RELATIVE}")
PICTURE = re.compile(rf'((?:src|srcset)="){RELATIVE}')


class BuildWithPth(build_py):
    """Builds the modules and writes the file; an editable install has no place for it."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            Path(self.build_lib, "notebook_accel.pth").write_text(PTH, encoding="utf-8")


def describe() -> str:
    """Return README with links that lead somewhere from any page."""
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    return LINK.sub(rf"\1{HOME}/blob/main/", PICTURE.sub(rf"\1{HOME}/raw/main/", text))


setup(
    cmdclass={"build_py": BuildWithPth},
    long_description=describe(),
    long_description_content_type="text/markdown",
)
