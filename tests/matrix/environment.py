"""Makes the environment of a row, which is kept for the next time."""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from packaging.utils import canonicalize_name

from .rows import IMAGES, Row, read_image

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / ".venv-matrix"
_STUBS: Final = ROOT / "tests" / "xla" / "cuda_stubs.py"
_CUDA: Final = re.compile(
    r"^Requires-Dist: (nvidia|triton|cuda)[-_a-z0-9]*.*\n", re.MULTILINE | re.IGNORECASE
)


class NoInterpreterError(Exception):
    """This machine has no such Python."""


def find_python(version: str) -> str:
    """Return the path of an interpreter, on the PATH or among those of pyenv.

    Args:
        version: such as `3.12`.

    Raises:
        NoInterpreterError: there is none.
    """
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    kept = (str(path) for path in sorted(root.glob(f"versions/{version}.*/bin/python{version}")))
    for path in (shutil.which(f"python{version}"), *kept):
        if path and subprocess.run([path, "--version"], capture_output=True).returncode == 0:
            return path
    raise NoInterpreterError(f"there is no Python {version}")


class Environment:
    """The environment of a row.

    Args:
        row: says what is in it.
    """

    def __init__(self, row: Row) -> None:
        self.row = row
        self.folder = FOLDER / row.name
        self.python = self.folder / "bin" / "python"
        self._stamp = self.folder / "stamp"

    def make(self) -> None:
        """Install everything, unless it was made from the same files before.

        Raises:
            NoInterpreterError: this machine lacks the row's Python.
            AssertionError: installing this package would replace a part of the image.
        """
        made_for = datetime.date.today() if self.row.torch is None else ""  # the newest of that day
        lists = [IMAGES / f"{self.row.image}.txt"] if self.row.image else []
        lists += [ROOT / self.row.constraints] if self.row.constraints else []
        sources = (ROOT / "pyproject.toml", _STUBS, *lists)
        wanted = f"{self.row}{made_for}" + "".join(path.read_text(encoding="utf-8") for path in sources)
        if self._stamp.exists() and self._stamp.read_text(encoding="utf-8") == wanted:
            self._stamp.touch()  # make compares times
            return
        interpreter = find_python(self.row.python)
        subprocess.run([interpreter, "-m", "venv", "--clear", str(self.folder)], check=True)
        image = read_image(self.row.image) if self.row.image else {}
        image.pop("python", None)
        torch_xla = image.pop("torch-xla", None)
        image.pop("torch", None)
        self._install_torch(torch_xla)
        if image:
            self._pip("install", *(f"{name}=={version}" for name, version in image.items()))
        own = f"{ROOT}[{','.join(self.row.extras)}]"
        if self.row.image:
            self._check_that_nothing_is_replaced(own)
        if self.row.lowest:
            self._pip("install", "uv")  # pip can only try the newest
            uv = (str(self.folder / "bin" / "uv"), "pip", "install", "--quiet", "--python", str(self.python))
            lowest = ("--resolution", "lowest-direct", *self.row.beside, "--editable", own)
            subprocess.run([*uv, *lowest], cwd=ROOT, check=True)
        else:
            limits = ["--constraint", str(ROOT / self.row.constraints)] if self.row.constraints else []
            self._pip("install", *limits, *self.row.beside, "--editable", own)
        if self.row.instead:
            self._pip("install", "--no-deps", *self.row.instead)
        self._stamp.write_text(wanted, encoding="utf-8")

    def _install_torch(self, torch_xla: str | None) -> None:
        """Install torch without the CUDA libraries, where a C compiler can make stubs of them."""
        wanted = f"torch=={self.row.torch}" if self.row.torch else "torch"
        xla = [f"torch_xla=={torch_xla}"] if torch_xla else []
        if shutil.which("cc") is None:
            self._pip("install", wanted, *xla)
            return
        self._pip("install", "--no-deps", wanted, *xla)
        site = Path(self._run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        self._run(str(_STUBS), str(site))
        (metadata,) = site.glob("torch-*.dist-info/METADATA")
        metadata.write_text(_CUDA.sub("", metadata.read_text(encoding="utf-8")), encoding="utf-8")

    def _check_that_nothing_is_replaced(self, own: str) -> None:
        before = {canonicalize_name(one["name"]): one["version"] for one in json.loads(self._list())}
        report = self.folder / "report.json"
        self._pip("install", "--dry-run", "--report", str(report), own)
        planned: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["install"]
        replaced = [
            f"{one['metadata']['name']} {before[name]} by {one['metadata']['version']}"
            for one in planned
            if (name := canonicalize_name(one["metadata"]["name"])) in before
        ]
        assert not replaced, f"installing {own} would replace {', '.join(replaced)}"

    def find_versions(self, names: Collection[str]) -> tuple[str, dict[str, str]]:
        """Return the version of Python, and those of the packages that are there.

        Args:
            names: of packages.
        """
        listed = {canonicalize_name(one["name"]): one["version"] for one in json.loads(self._list())}
        python = self._run("-c", "import platform; print(platform.python_version())").strip()
        return python, {name: listed[name] for name in names if name in listed}

    def _list(self) -> str:
        return self._run("-m", "pip", "--disable-pip-version-check", "list", "--format=json")

    def _pip(self, command: str, *words: str) -> None:
        self._run("-m", "pip", "--disable-pip-version-check", command, "--quiet", *words)

    def _run(self, *words: str) -> str:
        # a path of the caller's would show pip what is not of this environment
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [str(self.python), *words]
        done = subprocess.run(command, cwd=ROOT, env=own, stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout
