"""Notebooks without a front end: a real kernel runs the cells, output goes to the terminal as it comes."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import difflib
import keyword
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click
from ruamel.yaml import YAML

from .. import environ
from ..errors import ConfigError, Problem
from .notebook_file import NotebookFile
from .notebook_output import NotebookOutput

if TYPE_CHECKING:  # a launch of a script needs none of it
    from nbclient import NotebookClient

_OWN_KERNEL = "python3"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TAG, _INJECTED = "parameters", "injected-parameters"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A notebook to run: its path, values for its parameters, where the result goes, and the kernel's name."""

    path: Path
    parameters: Mapping[str, Any]
    output: Path
    kernel: str

    @property
    def command(self) -> list[str]:
        """The command of papermill that does the same."""
        words = [word for name, value in self.parameters.items() for word in ("-p", name, str(value))]
        return ["papermill", str(self.path), str(self.output), *words]


@click.command("launch NOTEBOOK.ipynb", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-p", "--parameter", "parameters", multiple=True, metavar="NAME=VALUE", help="Set a parameter.")
@click.option("-o", "--output", metavar="PATH", help="Executed notebook [default: NAME.executed.ipynb].")
@click.option(
    "--kernel", default=_OWN_KERNEL, help="Kernel that runs the cells [default: python3, this Python]."
)
@click.pass_context
def options(ctx: click.Context, parameters: tuple[str, ...], output: str | None, kernel: str) -> Request:
    """Run a notebook's cells in order and write it with their output.

    Parameters are set in a cell of their own after the one tagged `parameters`; values are read as YAML reads them.
    """
    path = Path(str(ctx.obj))
    return Request(
        path=path,
        parameters=dict(_parse_parameter(text) for text in parameters),
        output=Path(output or f"{path.stem}.executed.ipynb"),
        kernel=kernel,
    )


def parse(words: Sequence[str]) -> Request:
    """Return what a command line asks for.

    Args:
        words: the notebook's path, and the words after it.

    Raises:
        click.UsageError: the words are wrong.
    """
    with options.make_context(f"notebook-accel launch {words[0]}", list(words[1:]), obj=words[0]) as ctx:
        request: Request = options.invoke(ctx)
    return request


def _parse_parameter(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier() or keyword.iskeyword(name):
        raise click.BadParameter(f"{text!r} is not NAME=VALUE with a Python name", param_hint="'-p'")
    return name, parse_scalar(value)


def parse_scalar(text: str) -> Any:
    """Return the truth value, number or null that a text is in YAML; other texts as they are."""
    try:
        value = YAML(typ="safe", pure=True).load(text) if text else ""
    except Exception:  # where a value does not fit its tag, ruamel raises errors of any type
        return text
    return value if value is None or isinstance(value, (bool, int, float, str)) else text


def run(request: Request, environment: Mapping[str, str]) -> int:
    """Run a notebook, and write it with its output: while it runs, and at its end, also where a cell failed.

    Args:
        request: the notebook, its parameters, and where the result goes.
        environment: variables of the kernel, besides those of this process.

    Returns:
        The exit code: 1 where a cell failed or the kernel died, 128 + signal where one ended it.

    Raises:
        ConfigError: the notebook cannot be read, its result cannot be written, or there is no such kernel.
    """
    from jupyter_client.kernelspec import NoSuchKernel
    from nbclient.exceptions import CellExecutionError, DeadKernelError

    book = _read(request.path)
    _prepare(request.output)
    if request.parameters:
        for remark in inject(book, request.parameters):
            click.echo(f"Warning: {remark}", err=True)
    _clear_outputs(book)
    ended_by: list[int] = []
    output = NotebookOutput()
    file = NotebookFile(book, request.output, output.say)
    client = _make_client(book, request, ended_by, file, output)
    code = 1
    try:
        variables = {"NOTEBOOK_ACCEL_VIEW": "text", **environ.snapshot(), **environment}
        client.execute(env=variables, **_replace_closed())
        code = 0
    except CellExecutionError:
        if not ended_by:
            click.echo(
                f"notebook-accel: a cell of {request.path} failed", err=True
            )  # its traceback was shown
    except DeadKernelError as error:
        click.echo(f"notebook-accel: the kernel of {request.path} died: {error}", err=True)
    except NoSuchKernel as error:
        raise ConfigError([Problem(name="", text=f"there is no Jupyter kernel {error.name}")]) from None
    except KeyboardInterrupt:  # between cells, or where loops take no signals
        ended_by.append(signal.SIGINT)
    if ended_by:
        click.echo(f"notebook-accel: ended by {signal.Signals(ended_by[0]).name}", err=True)
        code = 128 + ended_by[0]
    try:
        file.close()
    except OSError as error:
        text = f"{request.output} cannot be written: {error.strerror or error}; if it is there, it lacks the last cells"
        click.echo(f"notebook-accel: {text}", err=True)
        return code or 1
    click.echo(f"notebook-accel: wrote {request.output}", err=True)
    return code


def _replace_closed() -> dict[str, int]:
    """Return the streams for a kernel that this process was started without: ipykernel does not start without one."""
    streams = {"stdout": sys.stdout, "stderr": sys.stderr}
    return {name: subprocess.DEVNULL for name, stream in streams.items() if stream is None}


def _read(path: Path) -> Any:
    import nbformat

    try:
        book = nbformat.read(path, as_version=4)
        _check_parts(book)
        return book
    except (nbformat.ValidationError, ValueError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError([Problem(name="", text=f"{path} is no notebook: {reason}")]) from None
    except (AssertionError, AttributeError, TypeError, RecursionError):  # what nbformat says of other JSON
        reason = "it is JSON of something else"
        raise ConfigError([Problem(name="", text=f"{path} is no notebook: {reason}")]) from None


def _check_parts(book: Any) -> None:
    """Raise TypeError or AttributeError where a book lacks what a run needs of it; nbformat has only warned of it."""
    if not isinstance(book.nbformat_minor, int):
        raise TypeError("a version is none")
    for cell in book.cells:
        tags = cell.metadata.get("tags", [])
        if (
            not isinstance(cell.cell_type, str)
            or not isinstance(cell.source, str)
            or not isinstance(tags, list)
        ):
            raise TypeError("a cell is none")


def _prepare(output: Path) -> None:
    """Make the folder of the output; ConfigError where the output cannot be written, before hours are spent."""
    try:
        if output.is_dir():
            text = f"{output} is a folder: name a file in it"
            raise ConfigError([Problem(name="output", text=text)])
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output.parent):
            pass
    except OSError as error:
        text = f"{output} cannot be written: {error.strerror or error}"
        raise ConfigError([Problem(name="output", text=text)]) from None


def inject(book: Any, values: Mapping[str, Any]) -> list[str]:
    """Put a cell with values after the one tagged `parameters`, or first; that of an earlier run is replaced.

    Args:
        book: the notebook, which is changed.
        values: what to set, by name.

    Returns:
        A remark for each name that the tagged cell does not set.
    """
    import nbformat

    lines = [f"{name} = {_write_literal(value)}" for name, value in values.items()]
    cell = nbformat.v4.new_code_cell("\n".join(["# Parameters", *lines]), metadata={"tags": [_INJECTED]})
    if (book.nbformat, book.nbformat_minor) < (4, 5):
        del cell["id"]
    book.cells = [old for old in book.cells if _INJECTED not in old.metadata.get("tags", [])]
    tagged = [index for index, old in enumerate(book.cells) if _TAG in old.metadata.get("tags", [])]
    book.cells.insert(tagged[0] + 1 if tagged else 0, cell)
    if not tagged:
        return [f"no cell is tagged {_TAG!r}: the values are set before the first cell"]
    known = _find_set_names(book.cells[tagged[0]].source)
    remarks = []
    for name in values.keys() - known:
        near = difflib.get_close_matches(name, known, n=1)
        remarks.append(
            f"the parameters cell does not set {name}{f', did you mean {near[0]}?' if near else ''}"
        )
    return sorted(remarks)


def _find_set_names(source: str) -> set[str]:
    try:
        tree = ast.parse(source)
    except SyntaxError:  # magics
        return {line.partition("=")[0].partition(":")[0].strip() for line in source.splitlines()}
    return {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def _write_literal(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    return repr(value)


def _clear_outputs(book: Any) -> None:
    """Remove the outputs of an earlier run: cells that are not reached would seem to have them of this one."""
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None


def _make_client(
    book: Any, request: Request, ended_by: list[int], file: NotebookFile, output: NotebookOutput
) -> NotebookClient:
    from nbclient import NotebookClient

    code = [i for i, cell in enumerate(book.cells) if cell.cell_type == "code" and cell.source.strip()]

    class LiveClient(NotebookClient):
        """Prints every output the moment it comes."""

        def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
            output.show(msg["msg_type"], msg["content"])
            file.note_change()
            return super().process_message(msg, cell, cell_index)

        async def async_execute_cell(self, cell: Any, cell_index: int, *args: Any, **kwargs: Any) -> Any:
            """Run a cell between its two lines; nbclient before 0.6 has no hooks for them."""
            if cell_index not in code or self.skip_cells_with_tag in cell.metadata.get("tags", []):
                return await super().async_execute_cell(cell, cell_index, *args, **kwargs)
            _take_signals(self, ended_by)
            file.start()
            started = time.perf_counter()
            first = next(line for line in cell.source.splitlines() if line.strip())
            click.echo(f"\n--- cell {code.index(cell_index) + 1} of {len(code)}: {first}", err=True)
            try:
                return await super().async_execute_cell(cell, cell_index, *args, **kwargs)
            finally:
                output.end_cell()
                file.write_soon()
                click.echo(f"--- {time.perf_counter() - started:.1f} s", err=True)

    folder = str(request.path.resolve().parent)
    return LiveClient(
        book,
        timeout=None,
        kernel_name=request.kernel,
        resources={"metadata": {"path": folder}},
        extra_arguments=["--log-level=ERROR"] if request.kernel == _OWN_KERNEL else [],
    )


def _take_signals(client: NotebookClient, ended_by: list[int]) -> None:
    """Let a signal interrupt the cell, as a front end's stop button does, and a second one kill the kernel.

    With nbclient's own handler the cell's output would be lost.
    """

    def take(signum: int) -> None:
        ended_by.append(signum)
        manager: Any = client.km
        stopped = manager.interrupt_kernel() if len(ended_by) == 1 else manager.shutdown_kernel(now=True)
        if asyncio.iscoroutine(stopped):
            pending.append(asyncio.ensure_future(stopped))

    pending: list[asyncio.Future[Any]] = []  # the loop itself keeps none
    for signum in _SIGNALS:
        asyncio.get_running_loop().add_signal_handler(signum, take, signum)
