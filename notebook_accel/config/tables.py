"""The table in docs/options.md: `python -m notebook_accel.config.tables docs/options.md` writes it anew."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from .arguments import of_configs, options
from .option import Option, as_text

BEGIN: Final = "<!-- options: written by python -m notebook_accel.config.tables docs/options.md -->\n"
END: Final = "<!-- end of options -->\n"
_HEAD: Final = "| argument | in files | default | meaning |\n|---|---|---|---|\n"
_FIRST: Final = (
    "| `function`, `args` | | | What each process runs: `function(*args)`; it may be defined in a cell. |\n"
    "| `config` | | `None` | A config for all that is not given by hand: `default`, the path of a file, or a "
    "`LaunchConfig`. |\n"
)


def as_markdown() -> str:
    """Return the table, a line for each argument of `notebook_launcher`."""
    return _HEAD + _FIRST + "".join(map(_line, options().values()))


def write_into(text: str) -> str:
    """Return a text with the table in place of the one that it has between its two marks.

    Args:
        text: of docs/options.md.

    Raises:
        ValueError: a mark is missing.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the text has no {((begin and END) or BEGIN).strip()}")
    return f"{before}{BEGIN}\n{as_markdown()}\n{END}{after}"


def _line(option: Option) -> str:
    argument = option.row.argument
    assert argument is not None
    notes = [argument.help or option.help]
    words = [f"`{as_text(word)}`" for word in option.choices or ()]
    if not all(word in notes[0] for word in words):
        notes.append(f"One of {', '.join(words)}.")
    if option.row.launches == "notebooks":
        notes.append("For notebooks only.")
    if option.face.flag is None:
        notes.append("It has no flag.")
    if option.row.engines:
        notes.append(f"Engines: {', '.join(f'`{name}`' for name in option.row.engines)}.")
    if argument.variable is not None:
        notes.append(f"By default what the environment variable `{argument.variable}` says, where it is set.")
    default = option.argument_default
    shown = f'"{default}"' if isinstance(default, str) else repr(default)
    in_files = f"`{option.name}`" if option.argument in of_configs() else ""
    cells = [f"`{option.argument}`", in_files, f"`{shown}`", " ".join(notes)]
    return f"| {' | '.join(cells)} |\n"


def main(path: str) -> None:
    """Write the table into a file."""
    file = Path(path)
    file.write_text(write_into(file.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
