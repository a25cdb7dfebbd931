"""What a process has imported from installed packages, and which variables such imports have read."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ... import collector

_FOLDERS: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_KERNELS: Final = (
    *("ipykernel.", "ipywidgets.", "jupyter_", "zmq.", "tornado.", "comm.", "matplotlib_inline."),
    *("debugpy.", "pydev", "_pydev"),
)
"""How the names of modules start by which a kernel talks to its front end, and to a debugger."""
_READ_BY_IMPORTS: Final = (
    *("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "ATEN_", "TORCH", "PYTORCH_"),
    *("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_", "MKLDNN_"),
)
"""How the names of variables start that Python, torch or a library below it reads once, when it starts."""
_NOT_READ: Final = (
    *("OMP_NUM_THREADS", "PYTHONPATH", "PYTHONWARNINGS"),  # a worker is told these anyway
    *("TORCHELASTIC_", "TORCH_NCCL_", "TORCH_FR_", "TORCHINDUCTOR_CACHE_DIR"),  # read when they are used
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),  # libraries set them for themselves
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Modules:
    """Modules of installed packages.

    Attributes:
        names: in the order in which they were imported.
        versions: of each package, what changes when it is installed anew.
    """

    names: Sequence[str] = ()
    versions: Mapping[str, tuple[int, int]]

    @classmethod
    def capture(cls, more: Iterable[str] = ()) -> Modules:
        """Return those that this process has.

        Args:
            more: names of modules that workers need besides.
        """
        versions: dict[str, tuple[int, int]] = {}
        others: set[str] = set()
        names = []
        for name, module in list(sys.modules.items()):
            package = name.partition(".")[0]
            if package in others:
                continue
            if package not in versions:
                origin = _find_origin(sys.modules.get(package))
                is_left = f"{package}.".startswith(_KERNELS) or package == __name__.partition(".")[0]
                if is_left or not any(folder in origin for folder in _FOLDERS):
                    others.add(package)
                    continue
                versions[package] = read_version(origin)
            if _find_origin(module) and getattr(module.__spec__, "name", None) == name:
                names.append(name)
        return cls(names=list(dict.fromkeys([*names, *more])), versions=versions)

    def differs(self, versions: Mapping[str, tuple[int, int]]) -> bool:
        """Return whether a package has other files here than it had elsewhere."""
        return any(self.versions.get(name, version) != version for name, version in versions.items())


def read_version(path: str) -> tuple[int, int]:
    """Return what changes when a file is written anew; zeros where there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return (0, 0)
    return (status.st_mtime_ns, status.st_size)


def import_all(names: Iterable[str]) -> None:
    """Import modules; what cannot be imported is left for the worker that needs it, which says why."""
    with collector.pause():
        for name in names:
            with contextlib.suppress(BaseException):  # some modules end the process that imports them
                importlib.import_module(name)


def _find_origin(module: object) -> str:
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    return origin if isinstance(origin, str) else ""


def read_by_imports(variables: Mapping[str, str]) -> dict[str, str]:
    """Return those of some variables that libraries read when they are imported."""
    return {
        name: text
        for name, text in variables.items()
        if name.startswith(_READ_BY_IMPORTS) and not name.startswith(_NOT_READ)
    }
