"""The manifest of a checkpoint: which files belong to it, with their sizes and checksums.

The rank that writes a file notes its size and checksums beside it, in a file of that rank; who puts the checkpoint in
its place gathers them in the manifest, once they agree with what is there. A checkpoint of Accelerate has no manifest,
and an older one of ours no checksums: nothing is compared there.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final

from ..errors import CheckpointError
from . import checksums, names, weights
from .checksums import Written

_VERSION: Final = 1
_OWN: Final = "checksum"
_UNSIGNED: Final = "0" * checksums.DIGITS
_NOTES: Final = ".written-"
_ADVICE: Final = "the file is damaged or of another checkpoint, load another one"

_SHOWN: Final = 3
_SAFETENSORS: Final = ".safetensors"

Names = Callable[[int, int], Sequence[str]]
"""Returns the names of what lies between two bytes of a file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What the manifest of a checkpoint says; nothing where it has none.

    Attributes:
        folder: of the checkpoint.
        facts: what it says besides files.
        sizes: of the files in bytes, by the path in the folder.
        checksums: those of the files that have some, by that path; see `checksums.describe`.
    """

    folder: Path
    facts: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    checksums: Mapping[str, str] = field(default_factory=dict)

    def check_files(self) -> None:
        """Raise CheckpointError where a file is missing or has another size."""
        for name, size in self.sizes.items():
            path = self.folder / name
            if not os.path.isfile(path):
                raise CheckpointError(f"{path} is missing, though {names.MANIFEST} lists it")
            if (found := path.stat().st_size) != size:
                raise CheckpointError(f"{path} has {found} bytes, it was written with {size}")

    def verify(
        self,
        path: Path,
        spans: Iterable[tuple[int, int]] | None = None,
        names_in: Names = lambda start, stop: (),
    ) -> None:
        """Check that a file holds the bytes that were written, if its checksums are known.

        Of a safetensors file this compares the header, which has the checksums of the tensors.

        Args:
            path: of the file, in the folder.
            spans: parts of it, each the byte where it starts and its length; None for all of it.
            names_in: names what is damaged.

        Raises:
            CheckpointError: it holds others, or cannot be read.
        """
        expected = self.checksums.get(path.relative_to(self.folder).as_posix())
        if expected is None:
            return
        if path.suffix == _SAFETENSORS:
            if weights.read_header(path).checksum != expected:
                raise CheckpointError(f"{path} is not the file that was saved here: {_ADVICE}")
            return
        try:
            damage = checksums.find_damage(path, expected, spans)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if damage is not None:
            start, stop = damage
            found = names_in(start, stop)
            listed = ", ".join(map(repr, found[:_SHOWN]))
            listed += f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            raise CheckpointError(
                f"{path}: some of the bytes {start:,} to {stop - 1:,} are not those that were written"
                f"{f' (in {listed})' if listed else ''}: {_ADVICE}"
            )


def describe(path: Path) -> Written:
    """Return what the manifest says of a file: the checksum of its header, where that has those of the rest."""
    size = path.stat().st_size
    if path.suffix == _SAFETENSORS:
        return Written(size, weights.read_header(path).checksum)
    return Written(size, checksums.describe(path))


def note(where: Path, rank: int, found: Mapping[str, Written]) -> None:
    """Leave what a rank has written for `write`.

    Args:
        where: the folder in which the checkpoint is written.
        rank: of this process.
        found: its files by the path in the folder.
    """
    (where / f"{_NOTES}{rank}").write_text(json.dumps(found), encoding="utf-8")


def write(folder: Path, facts: Mapping[str, Any], ranks: Iterable[int]) -> None:
    """List the files that the ranks have written, and those that hooks have put beside them.

    Args:
        folder: in which the checkpoint is written.
        facts: what the manifest says besides.
        ranks: those that wrote to the folder.

    Raises:
        CheckpointError: a file is missing or has another size than the rank that wrote it has noted.
    """
    noted: dict[str, Written] = {}
    for rank in ranks:
        path = folder / f"{_NOTES}{rank}"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing: something removes files of this save") from None
        noted |= {name: Written(*each) for name, each in found.items()}
        path.unlink()
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in names.list_files(folder)}
    for name, written in noted.items():
        if sizes.get(name) != written.size:
            what = f"has {sizes[name]:,} bytes" if name in sizes else "is missing"
            raise CheckpointError(
                f"{folder / name} {what}, though {written.size:,} were written: something changes files of this save"
            )
    content = {
        "version": _VERSION,
        **facts,
        "files": sizes,
        "checksums": {name: noted[name].checksums for name in sizes if name in noted},
        _OWN: _UNSIGNED,
    }
    text = json.dumps(content, indent=1)
    (folder / names.MANIFEST).write_text(_sign(text, _UNSIGNED, _checksum(text)), encoding="utf-8")


def read(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint; CheckpointError where it is damaged."""
    path = folder / names.MANIFEST
    if not path.exists():
        return Manifest(folder=folder)
    try:
        text = path.read_text(encoding="utf-8")
        content = dict(json.loads(text))
        if (version := int(content.pop("version"))) != _VERSION:
            raise CheckpointError(
                f"{path} is of version {version}, and this notebook_accel knows version {_VERSION}"
            )
        files = _check_types(content.pop("files"), int)
        known = _check_types(content.pop("checksums", {}), str)
        own = str(content.pop(_OWN, None))
        # older manifests have neither; a damaged name of one leaves the other
        if (known or own != str(None)) and _checksum(_sign(text, own, _UNSIGNED)) != own:
            raise ValueError("its text is not the one that was written")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    return Manifest(folder=folder, facts=content, sizes=files, checksums=known)


def _check_types(values: Any, kind: type) -> dict[str, Any]:
    """Return what is said of files; ValueError where it is of another type, or of a file outside of the folder."""
    for name, value in values.items():
        place = PurePosixPath(name)
        if type(value) is not kind or place.is_absolute() or ".." in place.parts:
            raise ValueError(f"{value!r} of the file {name!r}")
    return dict(values)


def _sign(text: str, old: str, new: str) -> str:
    """Return the text of a manifest with another checksum of its own, which is the last thing in it."""
    before, mark, after = text.rpartition(f'"{_OWN}": "{old}"')
    return f"{before}{mark and mark.replace(old, new)}{after}"


def _checksum(text: str) -> str:
    return checksums.show(zlib.crc32(text.encode()))
