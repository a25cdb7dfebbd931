"""`notebook-accel estimate-memory`: what a model needs to be loaded and trained, before it is."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any, Final

import rich_click as click

from ..estimation import sizes, sources
from ..estimation.sizes import Inventory, Need
from .progress import Progress
from .refusal import refuse_errors

_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB")
HEADINGS: Final = ("dtype", "largest layer", "total size", "training with Adam")
_ACTIVATIONS: Final = "Activations are not in it: they grow with the batch and the length of its rows."
_MIXED: Final = (
    "Training at float16 and bfloat16 is mixed precision by autocast: weights, gradients and Adam's moments stay at "
    "float32, and the weights have a copy at 16 bits."
)
_QUANTIZED: Final = "int8 and int4 are 8 and 4 bits for each weight; libraries leave some layers at 16."


class Several(click.RichCommand):
    """A command whose `--dtypes` takes several words, as in `--dtypes float32 int8`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        joined: list[str] = []
        for word in args:
            if len(joined) > 1 and joined[-2] == "--dtypes" and word in sizes.BITS:
                joined[-1] += f",{word}"
            else:
                joined.append(word)
        return super().parse_args(ctx, joined)


@click.command("estimate-memory", cls=Several)
@click.argument("model")
@click.option(
    "--dtypes",
    multiple=True,
    metavar="|".join(sizes.BITS),
    help="Dtypes to show, one or several [default: all]",
)
@click.option(
    "--library_name",
    "--library-name",
    type=click.Choice(["timm", "transformers"]),
    help="The library that knows the hub id.",
)
@click.option(
    "--trust_remote_code",
    "--trust-remote-code",
    is_flag=True,
    help="Run code that comes with the model: only for models whose code you have read.",
)
@click.option(
    "--args",
    "arguments",
    metavar="JSON",
    help='What a class or function is called with: {"name": value} or [value].',
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; sizes are in bytes.")
def estimate_memory(
    model: str,
    dtypes: tuple[str, ...],
    library_name: sources.Library | None,
    trust_remote_code: bool,
    arguments: str | None,
    as_json: bool,
) -> None:
    """Show how much memory a model needs to be loaded and trained.

    MODEL is a class, a function or a model in code (package.module:name), a file of weights, a folder with weights or
    a config.json of transformers, or an id of the Hugging Face hub. Nothing of its size is allocated.
    """
    with refuse_errors(), Progress(f"reading {model}"):
        chosen = _dtypes(dtypes)
        inventory = sources.find(
            model,
            library=library_name,
            trust_remote_code=trust_remote_code,
            arguments=_arguments(arguments),
        )
        needs = [sizes.estimate(inventory, dtype) for dtype in chosen]
    if as_json:
        click.echo(json.dumps(_content(inventory, needs), indent=2))
        return
    _show(inventory, needs)


def _dtypes(given: Sequence[str]) -> list[str]:
    chosen = [name.strip() for text in given for name in text.split(",")] or list(sizes.BITS)
    if unknown := [name for name in chosen if name not in sizes.BITS]:
        raise ValueError(f"dtype {unknown[0]!r} is unknown, choose from {', '.join(sizes.BITS)}")
    return list(dict.fromkeys(chosen))


def _arguments(text: str | None) -> Any:
    if text is None:
        return ()
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--args {text!r} is no JSON: {error}") from None
    if not isinstance(found, (dict, list)):
        raise ValueError(f'--args {text!r} is neither an object, {{"name": value}}, nor a list, [value]')
    return found


def _content(inventory: Inventory, needs: Sequence[Need]) -> dict[str, Any]:
    trained, count = _counts(inventory)
    return {
        "model": inventory.origin,
        "values": count,
        "trained_values": trained,
        "dtypes": {
            need.dtype: {key: value for key, value in dataclasses.asdict(need).items() if key != "dtype"}
            for need in needs
        },
        "notes": _notes(inventory, needs),
    }


def _notes(inventory: Inventory, needs: Sequence[Need]) -> list[str]:
    notes = [_ACTIVATIONS]
    if any(sizes.BITS[need.dtype] == 16 for need in needs):
        notes.append(_MIXED)
    if any(sizes.BITS[need.dtype] < 16 for need in needs):
        notes.append(_QUANTIZED)
    return [*notes, *inventory.notes]


def _counts(inventory: Inventory) -> tuple[int, int]:
    return (
        sum(part.count for part in inventory.parts if part.is_trained),
        sum(part.count for part in inventory.parts),
    )


def _show(inventory: Inventory, needs: Sequence[Need]) -> None:
    trained, count = _counts(inventory)
    rows = [
        (
            need.dtype,
            f"{size_text(need.largest_layer)} ({need.layer})",
            size_text(need.total),
            "-" if need.training is None else size_text(need.training),
        )
        for need in needs
    ]
    click.echo(f"{inventory.origin}: {count:,} values, {trained:,} of them trained")
    show_table(HEADINGS, rows)
    for note in _notes(inventory, needs):
        click.echo(note)


def show_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: drawn at a terminal, else plain columns.

    Args:
        headings: of the columns.
        rows: a text for each column.
    """
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(*headings)
        for row in rows:
            table.add_row(*row)
        Console().print(table)
    else:
        widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
        for row in (headings, *rows):
            line = "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))
            click.echo(line.rstrip())


def size_text(number: int) -> str:
    """Return bytes as people read them: `1.50 GiB`."""
    size = float(number)
    for unit in _UNITS:
        if size < 1024 or unit == _UNITS[-1]:
            break
        size /= 1024
    return f"{number} bytes" if unit == "bytes" else f"{size:.2f} {unit}"
