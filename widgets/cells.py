"""The magics of a session: `%session`, `%%distributed` and `%%rank`."""

from __future__ import annotations

import argparse
import ast
import shlex
import sys
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from IPython.core.error import UsageError

from notebook_accel.config.argument_checks import OUTPUTS
from notebook_accel.config.arguments import legal_words
from notebook_accel.config.hosts import read_list
from notebook_accel.config.slurm import parse_pairs
from notebook_accel.session import Session, current_session

_MAX_DIGITS: Final = 5  # of a rank
_WORDS: Final = ("close", "restart")


class SessionMagics:
    """Runs cells on the workers of a session, and starts a session where there is none.

    Args:
        shell: IPython's shell, which gets the magics.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._started: Session | None = None  # perhaps the only reference: without it the session closes

    def register(self) -> None:
        """Give the shell the magics."""
        self._shell.register_magic_function(self.session, "line", "session")
        self._shell.register_magic_function(self.distributed, "cell", "distributed")
        self._shell.register_magic_function(self.rank, "cell", "rank")

    def session(self, line: str) -> Session | None:
        """Start a session (`%session 4 --mixed-precision bf16`), show it, `%session restart` or `%session close`."""
        __tracebackhide__ = True
        options = _parse(line)
        if options is None:
            return None  # _parse has shown the help
        found = current_session()
        if options.what is None and not options.arguments and found is not None:
            return found
        if options.what in _WORDS and found is None:
            print("There is no session: `%session 2` starts one of two processes.", file=sys.stderr)
            return None
        if options.what is None and not options.arguments:
            print("There is no session: `%session 2` starts one of two processes.")
            return None
        if options.what == "close":
            assert found is not None
            found.close()
            self._started = None
            print("The session is closed, its processes have ended.")
            return None
        if options.what == "restart":
            assert found is not None
            found.restart()
            print(f"{found.num_processes} new workers, without variables.")
            return found
        if found is not None:
            raise UsageError(f"there is {found!r}: `%session close` ends it, then start another")
        self._started = Session(options.what, **options.arguments)
        return self._started

    def distributed(self, line: str, cell: str) -> None:
        """Run the cell on every worker; variables stay there, the last expression of each rank is shown."""
        __tracebackhide__ = True
        if line.strip():
            raise UsageError(
                f"%%distributed takes no {line.strip()!r}; `%%rank 0,1` runs a cell on some workers"
            )
        self._execute(cell, "%%distributed", "all")

    def rank(self, line: str, cell: str) -> None:
        """Run the cell on some workers: `%%rank 0`, `%%rank 0,2`, `%%rank 1-3`."""
        __tracebackhide__ = True
        self._execute(cell, f"%%rank {line}", _parse_ranks(line))

    def _execute(self, cell: str, first_line: str, ranks: Any) -> None:
        __tracebackhide__ = True
        session = current_session()
        if session is None:
            session = self._started = Session()
            count = session.num_processes
            print(f"Started a session of {count} {'process' if count == 1 else 'processes'}: {session!r}")
        if ranks != "all" and max(ranks) >= session.num_processes:
            raise UsageError(f"{first_line}: the ranks of the session are 0 to {session.num_processes - 1}")
        source = "\n" + self._shell.transform_cell(cell)  # below the line with the magic
        name = self._register_source(f"{first_line}\n{cell}")
        ast.parse(source, name)  # here, where its error is no rank's
        session.execute(source, ranks, filename=name)

    def _register_source(self, text: str) -> str:
        """Give tracebacks the lines of a cell as they are written, and return the file name to compile it under."""
        compiler = self._shell.compile
        return str(
            compiler.cache(text, _running_cell(compiler) or self._shell.execution_count, raw_code=text)
        )


def _running_cell(compiler: Any) -> int | None:
    """Return the number of the cell that runs, None outside a cell.

    IPython's own count is of no use: some versions count on before a cell runs, others after it.
    """
    numbers = getattr(compiler, "_filename_map", {})
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename in numbers:
            return int(numbers[frame.f_code.co_filename])
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _parse_ranks(line: str) -> list[int]:
    """Return the ranks that a line such as `0,2` or `1-3` names; UsageError where it names none."""
    ranks: list[int] = []
    for part in line.replace(",", " ").split():
        first, dash, last = part.partition("-")
        if not _is_rank(first) or (dash and not _is_rank(last)):
            raise UsageError(f"%%rank {line.strip()}: ranks are numbers, as in `%%rank 0` or `%%rank 0,2`")
        ranks += range(int(first), int(last if dash else first) + 1)
    if not ranks:
        raise UsageError("%%rank needs a rank, as in `%%rank 0` or `%%rank 0,2`")
    return ranks


def _is_rank(text: str) -> bool:
    """Return whether a text is a number that a rank may have."""
    return text.isdecimal() and len(text) <= _MAX_DIGITS


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%session: {message}; `%session --help` shows what there is")


def _parse(line: str) -> Any:
    """Return what a line asks for, None where it asks for help.

    `what` is a number, a word or None; `arguments` are the options of `Session` by name.
    """
    parser = _Parser(
        prog="%session", add_help=False, description="Workers that stay, for %%distributed and %%rank."
    )
    parser.add_argument(
        "what", nargs="?", help="number of processes to start, `restart` or `close`; none shows it"
    )
    parser.add_argument("--mixed-precision", choices=legal_words("mixed_precision"))
    parser.add_argument("--start-method", choices=legal_words("start_method"))
    parser.add_argument("--output", choices=OUTPUTS)
    parser.add_argument("--engine", help="what starts the workers, such as slurm in an allocation")
    parser.add_argument("--address", help="of the Ray cluster, such as auto")
    parser.add_argument("--hosts", nargs="+", action="extend", help="hosts that ssh reaches: gpu1 gpu2:4")
    parser.add_argument("--python", help="path of the Python on the hosts")
    parser.add_argument("--slurm", nargs="*", action="extend", help="nodes of SLURM: partition=gpu time=30")
    parser.add_argument("--num-nodes", type=int, help="number of nodes of SLURM")
    parser.add_argument("--slurm-keep", type=float, help="seconds that the nodes stay after the session")
    parser.add_argument("--config", help="`default`, or the path of a config file")
    parser.add_argument("--hang-timeout", type=_seconds, help="seconds, or `none`")
    parser.add_argument("--help", "-h", action="store_true")
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"%session {line.strip()}: {error}") from None
    options = parser.parse_args(words)
    if options.help:
        print(parser.format_help())
        return None
    names: Sequence[str] = (
        "mixed_precision",
        "start_method",
        "output",
        "engine",
        "address",
        "hosts",
        "python",
        "slurm",
        "num_nodes",
        "slurm_keep",
        "config",
        "hang_timeout",
    )
    options.arguments = {name: value for name in names if (value := getattr(options, name)) is not None}
    if "slurm" in options.arguments:
        options.arguments |= {"slurm": parse_pairs(options.slurm), "engine": options.engine or "slurm"}
    if "hosts" in options.arguments:
        options.arguments["hosts"] = read_list(options.hosts)
    if options.arguments.get("hang_timeout") == 0:
        options.arguments["hang_timeout"] = None
    if options.what is not None and options.what not in _WORDS:
        if not _is_rank(options.what):
            raise UsageError(f"%session {options.what}: a number of processes, `restart` or `close`")
        options.what = int(options.what)
    return options


def _seconds(text: str) -> float:
    return 0.0 if text.lower() == "none" else float(text)
