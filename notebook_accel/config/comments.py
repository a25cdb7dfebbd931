"""Keeps the comments of a config file also where their options moved or were removed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

_LINE: Final = re.compile(
    r"""^(?P<indent>\s*)(?P<name>\w+):(?:\s+(?:'[^']*'|"[^"]*"|[^'"#\s][^#]*?))?(?:\s+(?P<comment>\#.*))?\s*$"""
)
Path = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """A line with an option or a section, and the comments above it and behind it.

    Attributes:
        path: names of the section and the option.
        number: of the line, from 0.
        comments: the comments that belong to it.
    """

    path: Path
    number: int
    comments: tuple[str, ...]


def carry_over(old: str, new: str, moved: Mapping[Path, Path]) -> str:
    """Return the new text with the comments that only the old text has.

    Args:
        old: text of the file as it is.
        new: text that the file is to have.
        moved: the new path of each option that moved, by its old path.
    """
    there = {place.path: place for place in _find_places(new)}
    left = Counter(comment for place in _find_places(new) for comment in place.comments)
    lines = new.splitlines()
    above: dict[int, list[str]] = {}
    waiting: list[str] = []
    for place in _find_places(old):
        for comment in place.comments:
            if left[comment] > 0:
                left[comment] -= 1
            else:
                waiting.append(comment)
        target = there.get(moved.get(place.path, place.path))
        if waiting and target is not None:
            number = target.number
            if len(target.path) > len(place.path):  # into a section: above the whole section
                number = there[target.path[:-1]].number
            above.setdefault(number, []).extend(waiting)
            waiting = []
        elif not place.path:
            above.setdefault(len(lines), []).extend(waiting)
    found: list[str] = []
    for number, line in enumerate([*lines, ""]):
        indent = line[: len(line) - len(line.lstrip())]
        found += [indent + comment for comment in above.get(number, [])]
        found += [line] if number < len(lines) else []
    return "\n".join(found) + "\n"


def _find_places(text: str) -> Iterator[_Place]:
    """Yield the lines with a name, and at last one with an empty path for the end of the text."""
    comments: list[str] = []
    section = ""
    number = 0
    for number, line in enumerate(text.splitlines()):
        if line.lstrip().startswith("#"):
            comments.append(line.strip())
        elif match := _LINE.match(line):
            indent = match["indent"]
            section = section if indent else match["name"]
            behind = [match["comment"].strip()] if match["comment"] else []
            path = (section, match["name"]) if indent else (section,)
            yield _Place(path=path, number=number, comments=(*comments, *behind))
            comments = []
    yield _Place(path=(), number=number + 1, comments=tuple(comments))
