"""Finds what a notebook set in libraries, such as `F.mse_loss`: forks of it have that, fresh workers do not.

To look at all values takes a tenth of a second, so later only what has changed is looked at, by the ids of values. A
function that has got the id of the one that it replaced would be missed, which is unlikely.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Sequence, ValuesView
from dataclasses import dataclass
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

from ... import collector
from ..job import Job
from ..script import Script

_MAX_NAMES: Final = 3
_MAX_DEPTH: Final = 10  # of wrappers in wrappers
_NOT_PATCHES: Final = {"builtins._", "sys.last_type"}
"""The last value of a console, the class of the last error."""
_WRAPPERS: Final[dict[str, tuple[type, ...]]] = {
    "__wrapped__": (FunctionType, functools._lru_cache_wrapper),
    "func": (functools.partial, functools.partialmethod, functools.cached_property),
    "__func__": (MethodType, staticmethod, classmethod),
    "fget": (property,),
}
"""Types by the attribute in which they have what they wrap."""
# by ids, as the hash of a type may be code of its metaclass
_INSIDE: Final = {id(kind): attribute for attribute, kinds in _WRAPPERS.items() for kind in kinds}
# `vars` would run code of lazy modules, which would import, and of metaclasses
_get_module_scope: Final[Callable[[ModuleType], dict[str, Any]]] = vars(ModuleType)["__dict__"].__get__
_get_class_scope: Final[Callable[[type], dict[str, Any]]] = vars(type)["__dict__"].__get__  # a proxy of it


@dataclass(frozen=True, kw_only=True, slots=True)
class _Module:
    """What a module had when it was looked at.

    Attributes:
        values: of its attributes, and of those of each of its classes; views, which show what comes later.
        total: sum of the ids of all values.
        patches: names of values that are the notebook's.
    """

    values: Sequence[ValuesView[Any]]
    total: int
    patches: Sequence[str]


class PatchWatch:
    """Looks which functions and classes of the notebook are attributes of other modules, or of their classes.

    It runs no code of what it looks at.
    """

    def __init__(self) -> None:
        self._seen: dict[int, _Module] = {}

    def find(self) -> list[str]:
        """Return their names there, such as `torch.optim.sgd.SGD.step`."""
        notebook = vars(sys.modules["__main__"])
        kinds = {*_INSIDE, *_list_metaclasses(type)}
        seen = {id(notebook): _Module(values=(), total=0, patches=())}
        for name, module in sys.modules.copy().items():
            scope = _get_module_scope(module) if issubclass(type(module), ModuleType) else notebook
            if id(scope) not in seen:
                known = self._seen.get(id(scope))
                if known is None or known.total != _sum_ids(known.values):
                    known = _look(name, scope, kinds, notebook)
                seen[id(scope)] = known
        self._seen = seen
        return [name for module in seen.values() for name in module.patches if name not in _NOT_PATCHES]


_watch: Final = PatchWatch()


def find() -> list[str]:
    """Return what the notebook has set in libraries; the first look of a process takes a tenth of a second."""
    with collector.pause():
        return _watch.find()


def describe(job: Job) -> str:
    """Return a clause that names what fresh workers lack, where not the user but `auto` chose them; else nothing.

    Args:
        job: what is to run, its start method resolved.
    """
    is_chosen = job.options.get("start_method") == "auto" and job.start_method != "fork"
    if not (is_chosen and job.distributed) or job.quiet or isinstance(job.function, Script):
        return ""
    names = find()
    if not names:
        return ""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    shown = ", ".join(names[:_MAX_NAMES]) + more + (" was" if len(names) == 1 else " were")
    return f"{shown} set in this process, which fresh workers do not see; do it in the function"


def _list_metaclasses(kind: type) -> list[int]:
    return [id(kind), *chain.from_iterable(map(_list_metaclasses, type.__subclasses__(kind)))]


def _sum_ids(values: Iterable[ValuesView[Any]]) -> int:
    return sum(map(id, chain.from_iterable(values)))


def _look(name: str, scope: dict[str, Any], kinds: Collection[int], notebook: dict[str, Any]) -> _Module:
    """Return what a module has; `kinds` are the ids of the types whose objects may be the notebook's."""
    places: list[tuple[str, dict[str, Any]]] = [(name, scope)]
    patches: list[str] = []
    for place, inner in places:
        for attribute, value in inner.copy().items():  # a copy, as other threads may change it
            if value.__globals__ is scope if type(value) is FunctionType else id(type(value)) not in kinds:
                continue  # most are
            if issubclass(type(value), type) and _get_home(value) == place:
                places.append((f"{place}.{attribute}", _get_class_scope(value)))
            elif _is_own(value, notebook):
                patches.append(f"{place}.{attribute}")
    values = [inner.values() for _, inner in places]
    return _Module(values=values, total=_sum_ids(values), patches=patches)


def _is_own(value: Any, notebook: dict[str, Any]) -> bool:
    """Return whether a value, or what it wraps, is a function or class of the notebook."""
    for _ in range(_MAX_DEPTH):
        if type(value) is FunctionType and value.__globals__ is notebook:
            return True
        if (attribute := _INSIDE.get(id(type(value)))) is None:
            break
        value = getattr(value, attribute, None)
    return issubclass(type(value), type) and _get_home(value) == "__main__"


def _get_home(kind: type) -> str:
    """Return the name of the module that a class is from."""
    name = _get_class_scope(kind).get("__module__")
    return name if type(name) is str else ""
