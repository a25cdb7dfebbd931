"""Puts `notebook_accel.pth` into the wheel, beside the package: Python runs it as it starts."""

from setuptools.command.build_py import build_py


class BuildWithPth(build_py):
    """Builds the modules, and copies the file; an editable install has no place for it."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.copy_file("notebook_accel.pth", self.build_lib)
