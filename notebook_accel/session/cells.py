"""In a worker of a session: runs the code of a cell as a notebook does, and shows the value of its last expression."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import os
import re
import subprocess
import sys
import time
import timeit
import tokenize
from collections.abc import Callable, Mapping
from typing import Any, Final

from .. import probes
from ..environ import put, snapshot

_ROUNDS: Final = 3
_TIMEIT_OPTION: Final = re.compile(r"-([nr])\s*(\d+)(?:\s+|\Z)")
_UNABLE: Final = (
    "works in the notebook itself; code on a worker knows %time, %timeit, %cd, %pwd and %env, and !commands"
)


def execute(source: str, filename: str) -> None:
    """Run a cell in the worker's variables, and show the value of its last expression.

    A semicolon at the end hides the value. `await` works at the top level.

    Args:
        source: of the cell.
        filename: for tracebacks.
    """
    __tracebackhide__ = True
    value = _run(source, filename)
    if value is not None:
        variables()["_"] = value
        show(value)


def variables() -> dict[str, Any]:
    """Return the variables of a session, in one of its workers: those of the worker's module `__main__`."""
    return vars(sys.modules["__main__"])


def _run(source: str, filename: str) -> Any:
    """Run code; return the value of its last expression, None if a semicolon hides it."""
    __tracebackhide__ = True
    variables()["get_ipython"] = CellShell
    tree = ast.parse(source, filename)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr) or _is_hidden(source):
        return _evaluate(tree, filename, "exec")
    del tree.body[-1]
    _evaluate(tree, filename, "exec")
    return _evaluate(ast.Expression(last.value), filename, "eval")


def _evaluate(tree: ast.Module | ast.Expression, filename: str, mode: str) -> Any:
    __tracebackhide__ = True
    namespace = variables()
    code = compile(tree, filename, mode, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    if not code.co_flags & inspect.CO_COROUTINE:
        return eval(code, namespace)
    loop = namespace.get("__loop__")
    if not isinstance(loop, asyncio.AbstractEventLoop) or loop.is_closed():
        loop = namespace["__loop__"] = asyncio.new_event_loop()  # tasks go on in the next cell that awaits
        asyncio.set_event_loop(loop)
    return loop.run_until_complete(eval(code, namespace))


def _is_hidden(source: str) -> bool:
    """Return True if the last statement ends with a semicolon."""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER, tokenize.DEDENT)
    tokens = [
        token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in skipped
    ]
    return bool(tokens) and tokens[-1].string == ";"


def show(value: Any) -> None:
    """Show a value as `Out: ...`, or by the rich display that the notebook has for it.

    Args:
        value: of the last expression.
    """
    shell = probes.find_shell()
    formatter = getattr(shell, "display_formatter", None)
    if formatter is None:
        _print_out(repr(value))
        return
    data, metadata = formatter.format(value)
    if not data:
        return  # formatting has shown it
    if set(data) == {"text/plain"}:
        _print_out(data["text/plain"])
        return
    print("Out:")
    shell.display_pub.publish(data, metadata)


def _print_out(text: str) -> None:
    print(f"Out:\n{text}" if "\n" in text else f"Out: {text}")


class CellShell:
    """Stands for IPython's shell in a cell: `!command`, and the magics that work on a worker."""

    def system(self, command: str) -> None:
        """Run a shell command; its output is the worker's.

        Args:
            command: as typed; `{name}` and `$name` are replaced by variables.
        """
        with contextlib.suppress(AttributeError, ValueError):  # code may have removed or closed it
            sys.stdout.flush()
        variables()["_exit_code"] = subprocess.run(_expand(command), shell=True, check=False).returncode

    def getoutput(self, command: str) -> list[str]:
        """Return the lines that a shell command writes.

        Args:
            command: see `system`.
        """
        return subprocess.getoutput(_expand(command)).splitlines()

    def run_line_magic(self, name: str, line: str, *_: Any, **__: Any) -> Any:
        """Run `%name line`.

        Args:
            name: of the magic.
            line: its argument.

        Raises:
            NotImplementedError: it does not work on a worker.
        """
        __tracebackhide__ = True
        magic = _LINE_MAGICS.get(name)
        if magic is None:
            raise NotImplementedError(f"%{name} {_UNABLE}")
        return magic(_expand(line) if name in ("cd", "env") else line)

    def run_cell_magic(self, name: str, line: str, cell: str) -> Any:
        """Run `%%name line` over a cell.

        Args:
            name: of the magic.
            line: its argument.
            cell: the code.

        Raises:
            NotImplementedError: it does not work on a worker.
        """
        __tracebackhide__ = True
        if name == "time":
            caller = sys._getframe(1)  # its file and line, for tracebacks
            return _time("\n" * caller.f_lineno + cell, caller.f_code.co_filename)
        if name == "timeit":
            return _timeit(line, cell)
        raise NotImplementedError(f"%%{name} {_UNABLE} and %%time, %%timeit")


def _expand(text: str) -> str:
    """Replace `{name}` and `$name` by variables, as IPython does; what names no variable stays."""
    from IPython.utils.text import DollarFormatter

    try:
        return str(DollarFormatter().vformat(text, (), variables()))
    except Exception:  # a brace of the shell's own, for example
        return text


def _time(code: str, filename: str = "<timed>") -> Any:
    __tracebackhide__ = True
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        return _run(code, filename)
    finally:
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        print(f"CPU time: {_seconds(cpu)}, wall time: {_seconds(wall)}")


def _timeit(line: str, cell: str | None = None) -> None:
    """Time code many times; the line of a cell is what is run once before, as for IPython."""
    __tracebackhide__ = True
    options = {"n": 0, "r": _ROUNDS}
    while option := _TIMEIT_OPTION.match(line):
        options[option[1]] = int(option[2])
        line = line[option.end() :]
    if line.startswith("-") and line[1:2].isalpha():
        raise ValueError(
            f"%timeit {line}: on a worker it knows the options -n NUMBER and -r NUMBER; code that begins with a minus "
            "needs brackets"
        )
    setup, code = ("pass", line) if cell is None else (line or "pass", cell)
    timer = timeit.Timer(code, setup, globals=variables())
    number = options["n"] or timer.autorange()[0]
    repeat = max(1, options["r"])
    best = min(timer.repeat(repeat, number)) / number
    print(f"{_seconds(best)} a loop (best of {repeat} rounds of {number} loops)")


def _seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def _cd(line: str) -> str:
    os.chdir(os.path.expanduser(line.strip().strip("'\"") or "~"))
    return os.getcwd()


def _env(line: str) -> str | Mapping[str, str] | None:
    name, equals, value = line.partition("=")
    if equals:
        put({name.strip(): value.strip()})
        return None
    return snapshot().get(name.strip()) if name.strip() else snapshot()


_LINE_MAGICS: Final[Mapping[str, Callable[[str], Any]]] = {
    "time": _time,
    "timeit": _timeit,
    "cd": _cd,
    "pwd": lambda line: os.getcwd(),
    "env": _env,
    "set_env": _env,
    "matplotlib": lambda line: None,  # figures come into the cell anyway
}
