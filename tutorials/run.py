"""Runs a notebook in a real kernel, shows its output in the terminal as it arrives, and writes the result.

Cells with the tag `install` do not run: they install the package where notebooks are hosted.

python tutorials/run.py tutorials/01_first_launch.ipynb --output build/01_first_launch.ipynb
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

INSTALLS = "install"
"""The tag of cells that only hosted notebooks need. Those execute whole notebooks too, so it is none of nbclient's."""


class LiveClient(NotebookClient):
    """A client that prints each cell's number and first line, and every output the moment it comes."""

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        content = msg["content"]
        if msg["msg_type"] == "stream":
            print(content["text"], end="", flush=True)
        elif msg["msg_type"] in ("display_data", "execute_result"):
            print(content["data"].get("text/plain", ""), flush=True)
        elif msg["msg_type"] == "error":
            print("\n".join(content["traceback"]), flush=True)
        return super().process_message(msg, cell, cell_index)


def is_executed(cell: Any) -> bool:
    """Return whether a cell has code that is executed."""
    is_code = cell.cell_type == "code" and cell.source.strip() != ""
    return is_code and INSTALLS not in cell.metadata.get("tags", [])


def announce(notebook: Any, client: LiveClient) -> None:
    """Print a heading before each code cell and its time after it."""
    code = [i for i, cell in enumerate(notebook.cells) if is_executed(cell)]
    started: dict[int, float] = {}

    def start(cell: Any, cell_index: int) -> None:
        if cell_index in code:
            started[cell_index] = time.perf_counter()
            first = next(line for line in cell.source.splitlines() if line.strip())
            print(f"\n--- cell {code.index(cell_index) + 1} of {len(code)}: {first}", flush=True)

    def end(cell: Any, cell_index: int, execute_reply: Any) -> None:
        if cell_index in started:
            print(f"--- {time.perf_counter() - started[cell_index]:.1f} s", flush=True)

    client.on_cell_execute = start
    client.on_cell_executed = end


def lines_with(notebook: Any, word: str) -> list[str]:
    """Return the printed lines that contain a word."""
    texts = [
        output.text
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.output_type == "stream"
    ]
    return [line for line in "".join(texts).splitlines() if word.lower() in line.lower()]


def run(path: Path, output: Path, *, timeout_s: float, kernel: str) -> tuple[Any, Exception | None]:
    """Execute the notebook and write it, failed cells included; return it and the error that ended it."""
    notebook = nbformat.read(path, as_version=4)
    folder = str(path.resolve().parent)
    client = LiveClient(
        notebook,
        timeout=timeout_s,
        kernel_name=kernel,
        skip_cells_with_tag=INSTALLS,
        resources={"metadata": {"path": folder}},
    )
    announce(notebook, client)
    failure: Exception | None = None
    try:
        client.execute(env={"NOTEBOOK_ACCEL_VIEW": "text", **os.environ})
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        failure = error
    finally:
        output.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, output)
    return notebook, failure


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--output", type=Path, help="default: build/NAME of the notebook")
    parser.add_argument("--show", metavar="WORD", help="repeat the printed lines with this word at the end")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS", help="for one cell")
    parser.add_argument("--kernel", default="python3")
    options = parser.parse_args()
    output = options.output or Path("build") / options.notebook.name
    notebook, failure = run(options.notebook, output, timeout_s=options.timeout, kernel=options.kernel)
    print()
    for line in lines_with(notebook, options.show) if options.show else ():
        print(line)
    print(f"Executed notebook: {output.resolve()}")
    if failure is not None:
        last = str(failure).strip().splitlines()[-1]
        print(f"The notebook failed: {type(failure).__name__}: {last}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
