"""Puts `notebook_accel.pth` into the wheel, beside the package: Python runs it as it starts."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PTH = 'import os; os.environ.get("NOTEBOOK_ACCEL_AS_ACCELERATE") and __import__("notebook_accel")\n'


class BuildWithPth(build_py):
    """Builds the modules and writes the file; an editable install has no place for it."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            Path(self.build_lib, "notebook_accel.pth").write_text(PTH, encoding="utf-8")


setup(cmdclass={"build_py": BuildWithPth})
