"""Finds `accelerate` and its modules in this package; workers and child processes import it first, so it is small."""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Final

from .. import collector, environ
from . import paths
from .names import run_command

VERSION: Final = "1.15.0"
VARIABLE: Final = "NOTEBOOK_ACCEL_AS_ACCELERATE"
_NAME: Final = "accelerate"
_OURS: Final = __name__.partition(".")[0]
_STARTUP: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")
_PLACE: Final = os.path.join(os.sep, _OURS, "takeover", "startup")
"""How the folder ends in each installation of this package: two that named each other would never come to an end."""
_METADATA: Final = {
    "METADATA": f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: {VERSION}\nSummary: served by {_OURS}\n"
    f"Home-page: https://github.com/huggingface/{_NAME}\n",  # by which libraries tell it from others of the name
    "INSTALLER": f"{_OURS}\n",
    "top_level.txt": f"{_NAME}\n",
}
_NOT_NAMED: Final = (_NAME, "__mp_main__")  # the second is `__main__` once more
_HANDING_ON: Final = ("", "utils")
_NOTHING: Final = object()
_SHOWN: Final = 3  # importers that an error names


def take_over_accelerate() -> None:
    """Let `import accelerate` give the names of this package: in this process and in all that it starts from now on.

    Call it before anything imports Accelerate, which need not be installed. It lasts as long as the process. A second
    call changes nothing.

    Raises:
        RuntimeError: Accelerate was imported already; the message says by which modules.
    """
    install()
    environ.put(list_variables(environ.snapshot()))


def install() -> None:
    """Take over in this process alone; see `take_over_accelerate`."""
    if is_installed():
        return
    if sys.modules.get(_NAME) is not None:
        raise RuntimeError(_describe_importers())
    sys.meta_path.insert(0, Finder())


def is_installed() -> bool:
    """Return True if imports of Accelerate in this process give the names of this package."""
    return any(isinstance(finder, Finder) for finder in sys.meta_path)


def list_variables(values: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make Python processes take over as they start.

    Python imports `sitecustomize` from the first folder of PYTHONPATH that has one, before anything else.

    Args:
        values: the environment so far.
    """
    text = values.get("PYTHONPATH", "")
    folders = text.split(os.pathsep) if text else []  # an empty entry is the current folder
    kept = [folder for folder in folders if not folder or not os.path.abspath(folder).endswith(_PLACE)]
    return {VARIABLE: "true", "PYTHONPATH": os.pathsep.join([_STARTUP, *kept])}


def complete_variables(values: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a process; where it asks for the take-over, with what makes it happen from the start.

    Args:
        values: all variables of the process.
    """
    return {**values, **(list_variables(values) if environ.flag_in(values, VARIABLE) else {})}


class ServedModule(ModuleType):
    """A module at a path of Accelerate; its names are objects of this package, imported when they are asked for."""

    _replaced: dict[str, Any]  # what names stood for before they were set

    def __init__(self, name: str) -> None:
        super().__init__(name)
        vars(self)["_replaced"] = {}

    def __getattr__(self, name: str) -> Any:
        path = self.__name__.partition(".")[2]
        found = paths.find(path, name)
        if found is not None:
            module, own_name = found
            with collector.pause():
                value = getattr(importlib.import_module(f"{_OURS}.{module}"), own_name)
        elif paths.is_path(inner := f"{path}.{name}".lstrip(".")):
            value = importlib.import_module(f"{_NAME}.{inner}")
        else:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        vars(self)[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute: where it stands for a name here, in the modules here too, whose code then uses it.

        The top package and `utils` only hand names on: what is set there counts there alone. A function keeps its name
        where a module at an inner path has the same one.
        """
        path = self.__name__.partition(".")[2]
        if paths.find(path, name) is None:
            super().__setattr__(name, value)
        elif not isinstance(value, ServedModule):
            before = getattr(self, name)
            self._replaced.setdefault(name, before)
            _replace(path, name, before, value)
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Remove an attribute; one that stands for a name here is again what it was."""
        before = getattr(self, name)
        super().__delattr__(name)
        if name in self._replaced:
            _replace(self.__name__.partition(".")[2], name, before, self._replaced.pop(name))

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *paths.names_of(self.__name__.partition(".")[2])})


class Finder:
    """Finds modules and metadata of Accelerate, for `sys.meta_path`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module of Accelerate; None for all others."""
        top, _, inner = fullname.partition(".")
        if top != _NAME or not paths.is_path(inner):
            return None
        spec = importlib.machinery.ModuleSpec(
            fullname,
            self,  # type: ignore[arg-type]  # a loader by its methods: the abstract class takes long to import
            origin=paths.__file__,
            is_package=paths.is_package(inner),
        )
        spec.has_location = True
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return an empty module."""
        return ServedModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Name what the module has."""
        inner = module.__name__.partition(".")[2]
        vars(module)["__doc__"] = f"Accelerate's `{module.__name__}`, served by {_OURS}."
        vars(module)["__all__"] = paths.names_of(inner)
        if inner in paths.MAINS:
            vars(module)["main"] = functools.partial(run_command, *paths.MAINS[inner])
        if not inner:
            vars(module)["__version__"] = VERSION

    def get_code(self, fullname: str) -> Any:
        """Return the code of a module that `python -m` runs: what `main` does, or nothing."""
        if not paths.has_main(fullname.partition(".")[2]):
            return compile("", paths.__file__, "exec")
        text = f"import sys\nfrom {fullname} import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
        return compile(text, paths.__file__, "exec")

    def find_distributions(self, context: Any = None) -> Iterator[Any]:
        """Yield the metadata of Accelerate, where it is asked for by name or with all others.

        Who looks in certain folders, as pip does, gets nothing: there is nothing in them.
        """
        if context is not None and "path" in vars(context):
            return
        name = getattr(context, "name", None)
        if name is None or name.lower() == _NAME:
            yield _make_distribution()

    def invalidate_caches(self) -> None:
        """Forget nothing, because nothing is kept."""


def _replace(path: str, name: str, before: Any, after: Any) -> None:
    """Set a name in those modules here that stand for a module of Accelerate, and in those inside them.

    Args:
        path: of the module of Accelerate.
        name: of a function or class.
        before: what it stands for now; where it is something else, it stays.
        after: what it shall stand for.
    """
    found = paths.find(path, name)
    if path in _HANDING_ON or found is None:
        return
    own = [f"{_OURS}.{module}" for module in paths.PATHS[path]]
    for key, module in list(sys.modules.items()):
        is_own = any(key == one or key.startswith(f"{one}.") for one in own)
        if is_own and module is not None and vars(module).get(found[1], _NOTHING) is before:
            setattr(module, found[1], after)


def _make_distribution() -> Any:
    import importlib.metadata  # for 20 ms, which processes that do not ask are spared
    from pathlib import Path

    class ServedDistribution(importlib.metadata.Distribution):
        """What `importlib.metadata` tells of Accelerate."""

        def read_text(self, filename: str) -> str | None:
            return _METADATA.get(filename)

        def locate_file(self, path: Any) -> Any:
            return Path(__file__).parent / path

    return ServedDistribution()


def _describe_importers() -> str:
    """Return what to do about modules that have imported Accelerate already, with their names and files."""
    loaded = sys.modules[_NAME]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names that are asked for may be deprecated
        found = [
            f"{name} ({getattr(module, '__file__', None) or 'no file'})"
            for name, module in list(sys.modules.items())
            if isinstance(module, ModuleType)
            and name.partition(".")[0] not in _NOT_NAMED
            and _has_imported(module)
        ]
    who = ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
    by = f", by {who}" if found else ""
    return (
        f"accelerate was imported already, from {getattr(loaded, '__file__', None)}{by}: restart the kernel, and call "
        f"notebook_accel.take_over_accelerate() (or set {VARIABLE}=1) before the first import of it"
    )


def _has_imported(module: ModuleType) -> bool:
    for value in list(vars(module).values()):
        try:
            origin = value.__name__ if isinstance(value, ModuleType) else vars(type(value)).get("__module__")
            if isinstance(value, type) or callable(value):
                origin = getattr(value, "__module__", None)
        except Exception:  # a proxy that imports, when it is asked, what is not there
            continue
        if isinstance(origin, str) and origin.partition(".")[0] == _NAME:
            return True
    return False
