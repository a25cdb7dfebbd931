"""Config files as text and as nested values: what older ones say in today's words, and how one is written."""

from __future__ import annotations

import io
import json
import os
import re
import stat
import tempfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, TaggedScalar
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.scalarstring import SingleQuotedScalarString

from ..errors import ConfigError, Problem
from . import comments

_LARGEST: Final = 1 << 20
_LARGEST_NUMBER: Final = 10**1000  # Python itself writes 4,300 digits
_MOST_VALUES: Final = 100_000
_JSON: Final = ".json"
_TRUTH_WORDS: Final = frozenset({"y", "yes", "n", "no", "true", "false", "on", "off"})
_TWICE: Final = re.compile(r'found duplicate key "(.*?)"')
ENDINGS: Final = (".yaml", ".yml", _JSON)
"""How names of config files end."""

_ELSEWHERE: Final = Problem(
    name="compute_environment",
    text="compute_environment AMAZON_SAGEMAKER: runs are launched on this machine only",
)

# names of older files and of the user guide, each with the path it has now; None where it means nothing today
_RENAMED: Final[Mapping[tuple[str, ...], tuple[str, ...] | None]] = {
    ("dynamo_backend",): ("dynamo_config", "dynamo_backend"),
    ("fsdp_config", "fsdp_backward_prefetch_policy"): ("fsdp_config", "fsdp_backward_prefetch"),
    ("fp8_config", "fp8_backend"): ("fp8_config", "backend"),
    ("fp8_config", "fp8_opt_level"): ("fp8_config", "opt_level"),
    ("megatron_lm_config", "megatron_lm_other_megatron_args"): None,
    ("ipex_config",): None,
    ("use_mps_device",): None,
    ("use_xpu",): None,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A file as it was read.

    Attributes:
        path: of the file.
        values: nested values, by today's names.
        ignored: names in it that mean nothing today.
        tree: what ruamel read, with its lines.
        moved: where options of today's names were in it.
    """

    path: Path
    values: Mapping[str, Any]
    ignored: tuple[str, ...]
    tree: Any
    moved: Mapping[str, tuple[str, ...]]

    def locate(self, problems: Iterable[Problem]) -> list[Problem]:
        """Return problems of the values, each with the line that it is about."""
        is_elsewhere = str(self.values.get("compute_environment")).upper() == "AMAZON_SAGEMAKER"
        wrong = [_ELSEWHERE] if is_elsewhere else problems  # all else follows from it
        return [self._locate(problem) for problem in wrong]

    def _locate(self, problem: Problem) -> Problem:
        names = self.moved.get(problem.name) or tuple(problem.name.split("."))
        tree, line = self.tree, 0
        for name in names:
            if not isinstance(tree, CommentedMap) or name not in tree:
                break
            if name in (tree.lc.data or {}):  # else it is merged from another place
                line = tree.lc.key(name)[0] + 1
            tree = tree[name]
        return replace(problem, where=f"{self.path}:{line}" if line else str(self.path))


def expand(path: str | os.PathLike[str]) -> Path:
    """Return the path with `~` replaced; `~` of a user who does not exist stays, and then no such file is found."""
    try:
        return Path(os.path.expanduser(path))
    except ValueError:  # no name of a user
        return Path(path)


def read(path: str | os.PathLike[str], sections: Collection[str]) -> Document:
    """Read a YAML or JSON file, also one that Accelerate wrote, of any version.

    Args:
        path: of the file.
        sections: the names of all sections.

    Raises:
        ConfigError: it cannot be read, with file and line.
    """
    path = expand(path)
    if not os.path.isdir(path):
        _check_ending(path)
    text = _read_text(path)
    tree = _parse(path, text)
    if not text.strip():  # most often what a full disk or a crash left of a file
        raise ConfigError(
            [Problem(name="", text=f"{path} is empty: expected lines such as 'num_processes: 2'")]
        )
    # JSON is YAML but for how it escapes some characters
    found = json.loads(text) or {} if path.suffix == _JSON else tree
    values, moved, ignored = _translate(found, sections)
    return Document(path=path, values=values, ignored=tuple(ignored), tree=tree, moved=moved)


def write(values: Mapping[str, Any], path: str | os.PathLike[str], *, replace: bool = False) -> Path:
    """Write nested values, whole or not at all; a file that is there keeps its comments and its order.

    Args:
        values: what the file is to say.
        path: where to.
        replace: replace a file that is there also if it is none that can be read.

    Returns:
        The path, with `~` replaced.

    Raises:
        ConfigError: the file that is there cannot be read, or the name is none of a config file.
    """
    path = expand(path)
    _check_ending(path)
    before, tree = "", CommentedMap()
    if not _is_name(path):
        raise ConfigError([Problem(name="", text=f"{str(path)!r} is no name of a file")])
    if os.path.exists(path):
        try:
            before = _read_text(path)
            tree = _parse(path, before)
        except ConfigError:
            if not replace or not os.path.isfile(path):
                raise
            before = ""
    if path.suffix == _JSON:
        text = json.dumps(values, indent=2) + "\n"
    else:
        _update(tree, values)
        text = _dump(tree)
        text = _restore_comments(before, text) if "#" in before else text
    _replace(Path(os.path.realpath(path)), text)
    return path


def _is_name(path: Path) -> bool:
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(part, path.stat().st_mode & 0o777 if path.exists() else 0o644)
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise


def _restore_comments(before: str, text: str) -> str:
    """Return the text with the comments of options that moved or were removed."""
    moved = {path: now for path, now in _RENAMED.items() if now is not None}
    whole = comments.carry_over(before, text, moved)
    yaml = YAML(typ="safe")
    return whole if yaml.load(whole) == yaml.load(text) else text


def as_yaml(values: Mapping[str, Any]) -> str:
    """Return what `write` would write to a new file."""
    tree = CommentedMap()
    _update(tree, values)
    return _dump(tree)


def _quote(value: Any) -> Any:
    """Quote words that older YAML reads as truth values, which is what Accelerate's reader does."""
    if isinstance(value, str) and value.lower() in _TRUTH_WORDS:
        return SingleQuotedScalarString(value)
    return value


def _check_ending(path: Path) -> None:
    if path.suffix not in ENDINGS:
        raise ConfigError([Problem(name="", text=f"{path} does not end in {', '.join(ENDINGS)}")])


def _read_text(path: Path) -> str:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):  # it may have no end
            raise ConfigError([Problem(name="", text=f"{path} is no file but a pipe or a device")])
        size = found.st_size
        if size > _LARGEST:
            raise ConfigError([Problem(name="", text=f"{path} has {size} bytes: no config file is so large")])
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        text = f"{path} is no text: byte {error.start} is no UTF-8"
        raise ConfigError([Problem(name="", text=text)]) from None
    except OSError as error:
        raise ConfigError([Problem(name="", text=f"{path} cannot be read: {error.strerror}")]) from None
    except ValueError as error:  # no name of a file
        raise ConfigError([Problem(name="", text=f"{str(path)!r} cannot be read: {error}")]) from None


def _parse(path: Path, text: str) -> Any:
    try:
        if path.suffix == _JSON:
            json.loads(text)  # for its clearer errors
        yaml = YAML()
        yaml.preserve_quotes = True
        tree = yaml.load(text.replace("\t", " ") if path.suffix == _JSON else text)
        _check_values(tree, {})
    except json.JSONDecodeError as error:
        raise ConfigError([Problem(name="", text=error.msg, where=f"{path}:{error.lineno}")]) from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 0 if mark is None else mark.line + 1
        raise ConfigError([Problem(name="", text=_explain(error), where=f"{path}:{line}")]) from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        reason = f"a character that YAML has not: {text[error.position]!r}"
        raise ConfigError([Problem(name="", text=reason, where=f"{path}:{line}")]) from None
    except Exception as error:  # where a value does not fit its tag, ruamel raises errors of any type
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError([Problem(name="", text=f"{path} is no YAML: {reason}")]) from None
    if tree is None:
        return CommentedMap()
    if not isinstance(tree, CommentedMap):
        raise ConfigError(
            [Problem(name="", text=f"{path} holds no options: expected lines such as 'num_processes: 2'")]
        )
    return tree


def _check_values(tree: Any, known: dict[int, int | None]) -> int:
    """Return how many values there are, those of an alias once more at each place.

    Args:
        tree: as it was read.
        known: the numbers of lists and mappings so far, by their identities; None while one is being counted.

    Raises:
        ValueError: they are more than a config has, one holds itself, or a number is too long to be written.
    """
    if isinstance(tree, int) and not -_LARGEST_NUMBER < tree < _LARGEST_NUMBER:
        raise ValueError("a number has more than 1,000 digits")
    if not isinstance(tree, (Mapping, list, tuple, set)):
        return 1
    if id(tree) not in known:
        known[id(tree)] = None
        parts = [*tree.keys(), *tree.values()] if isinstance(tree, Mapping) else tree
        known[id(tree)] = 1 + sum(_check_values(part, known) for part in parts)
    count = known[id(tree)]
    if count is None:
        raise ValueError("a list or mapping holds itself")
    if count > _MOST_VALUES:
        raise ValueError(f"aliases make more than {_MOST_VALUES:,} values of it")
    return count


def _explain(error: MarkedYAMLError) -> str:
    text = str(error.problem or error.context).strip().partition("\n")[0]
    if twice := _TWICE.match(text):
        return f"{twice[1]} stands there twice"
    return "a tab: YAML is indented with spaces" if "\\t" in text else text


def _translate(
    tree: Mapping[str, Any], sections: Collection[str]
) -> tuple[dict[str, Any], dict[str, tuple[str, ...]], list[str]]:
    """Translate the names of older files.

    Returns:
        The values by today's names, without those that are null; the old path of each option that moved; and the names
        that mean nothing today.
    """
    values: dict[str, Any] = {}
    moved: dict[str, tuple[str, ...]] = {}
    ignored: list[str] = []
    for path, value in _list_leaves(tree, sections):
        if path == ("fp16",) and isinstance(value, bool):  # all that the oldest files say of precision
            values.setdefault("mixed_precision", "fp16" if value else "no")
            continue
        now = _RENAMED.get(path, path)
        if now is None:
            ignored += [".".join(path)] if value not in (None, False, {}) else []
            continue
        if now != path:
            moved[".".join(now)] = path
        if value is None or (path == ("num_processes",) and value == -1):
            continue
        place = values
        for name in now[:-1]:
            place = place.setdefault(name, {})
        place[now[-1]] = value.value if _is_marked_text(value) else value
    if "parallelism_config" in values:
        values.setdefault("use_parallelism_config", True)
    return values, moved, ignored


def _is_marked_text(value: Any) -> bool:
    """Return whether a value is a text with the mark `!!str`, as in `!!str no`."""
    return isinstance(value, TaggedScalar) and str(value.tag) == "tag:yaml.org,2002:str"


def _list_leaves(tree: Mapping[str, Any], sections: Collection[str]) -> list[tuple[tuple[str, ...], Any]]:
    found: list[tuple[tuple[str, ...], Any]] = []
    for name, value in tree.items():
        if name in sections and isinstance(value, Mapping):
            found += [((name, key), inner) for key, inner in value.items()]
        else:
            found.append(((name,), value))
    return found


def _update(tree: Any, values: Mapping[str, Any]) -> None:
    """Change the tree to the values; lines that are right already stay as they are."""
    for name in [name for name in tree if name not in values]:
        del tree[name]
    for name, value in values.items():
        if isinstance(value, Mapping) and isinstance(tree.get(name), CommentedMap):
            _update(tree[name], value)
        elif isinstance(value, Mapping):
            tree[name] = CommentedMap()
            _update(tree[name], value)
        elif name not in tree or tree[name] != value or (isinstance(value, float) and "e" in repr(value)):
            tree[name] = _quote(value)  # an exponent as it was written may lose its number's last digit


def _dump(tree: Any) -> str:
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 4096
    file = io.StringIO()
    yaml.dump(tree, file)
    return file.getvalue()
