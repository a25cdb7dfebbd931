"""Makes this package believe that it runs on macOS, and takes away what it would not find there.

Python imports this as it starts, where the folder is on the path. `NOTEBOOK_ACCEL_TEST_SYSTEM` names the system,
`darwin`. Only modules of this package are changed, as they are loaded. The libraries under them stay those of Linux,
and work, but that processes start by `spawn` where nobody says how.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from typing import Any, Final

SYSTEM: Final = os.environ.get("NOTEBOOK_ACCEL_TEST_SYSTEM", "")
PREFIX: Final = "_elsewhere_"
"""Begins the name under which `sys.modules` has the stand-in for a module."""
_PACKAGE: Final = "notebook_accel"
_NOT_ON_MACOS: Final = {
    "mmap": "MADV_DONTDUMP MAP_NORESERVE MAP_POPULATE",
    "fcntl": "F_GETPIPE_SZ F_GETSIG F_NOTIFY F_SETPIPE_SZ F_SETSIG",
    "os": "MFD_CLOEXEC O_DIRECT O_PATH O_TMPFILE copy_file_range eventfd getrandom memfd_create pidfd_open "
    "posix_fadvise sched_getaffinity sched_setaffinity splice",
    "resource": "prlimit",
    "select": "EPOLLERR EPOLLET EPOLLHUP EPOLLIN EPOLLOUT epoll",
    "selectors": "EpollSelector",
    "signal": "SIGPWR SIGRTMAX SIGRTMIN SIGSTKFLT pidfd_send_signal sigtimedwait sigwaitinfo",
    "socket": "SCM_CREDENTIALS SOCK_CLOEXEC SOCK_NONBLOCK SOCK_SEQPACKET SO_PASSCRED SO_PEERCRED",
}


class _StandIn(types.ModuleType):
    """A module with all that another has and is set to, but for what the system lacks."""

    def __init__(self, name: str, missing: frozenset[str]) -> None:
        super().__init__(PREFIX + name)
        vars(self).update(_real=importlib.import_module(name), _missing=missing)

    def __getattr__(self, name: str) -> Any:
        if name in self._missing:
            raise AttributeError(f"{self._real.__name__!r} has no {name!r} on {SYSTEM}")
        return getattr(self._real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real, name, value)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._real)} - self._missing)


class _Renamer(ast.NodeTransformer):
    """Puts the system's name in the place of `sys.platform`, and stand-ins in the place of modules."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        is_platform = isinstance(node.value, ast.Name) and (node.value.id, node.attr) == ("sys", "platform")
        return ast.copy_location(ast.Constant(SYSTEM), node) if is_platform else self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> ast.AST:
        for alias in node.names:
            if alias.name in self._names:
                alias.asname, alias.name = alias.asname or alias.name, PREFIX + alias.name
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        if not node.level and node.module in self._names:
            node.module = PREFIX + node.module
        return node


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module of this package; what it compiles is not kept, because others load the same files unchanged."""

    names: frozenset[str] = frozenset()

    def get_code(self, fullname: str) -> types.CodeType:
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        code: types.CodeType = compile(_Renamer(self.names).visit(tree), path, "exec", dont_inherit=True)
        return code


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules of this package where the others would, and has them loaded by `_Loader`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != _PACKAGE:
            return None
        others: list[Any] = [finder for finder in sys.meta_path if finder is not self]
        found = (
            finder.find_spec(fullname, path, target) for finder in others if hasattr(finder, "find_spec")
        )
        spec: importlib.machinery.ModuleSpec | None = next((one for one in found if one is not None), None)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            assert spec.origin is not None
            spec.loader = _Loader(fullname, spec.origin)
        return spec


def install() -> None:
    """Make modules of this package, which are imported from now on, believe that they run on another system."""
    import multiprocessing.context

    for name, words in _NOT_ON_MACOS.items():
        sys.modules[PREFIX + name] = _StandIn(name, frozenset(words.split()))
    _Loader.names = frozenset(_NOT_ON_MACOS)
    sys.meta_path.insert(0, _Finder())
    default: Any = multiprocessing.context._default_context  # what no caller has chosen yet
    default._default_context = multiprocessing.get_context("spawn")


if SYSTEM:
    install()
