"""Config files: where they lie, what older ones say in today's words, and how one is written."""

from __future__ import annotations

import io
import json
import os
import re
import stat
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, TaggedScalar
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.scalarstring import SingleQuotedScalarString

from .. import environ
from ..errors import ConfigError, Problem
from . import comments, problems
from .schema import LaunchConfig, matters, table

_LARGEST: Final = 1 << 20
_JSON: Final = ".json"
_TRUTH_WORDS: Final = frozenset({"y", "yes", "n", "no", "true", "false", "on", "off"})
_TWICE: Final = re.compile(r'found duplicate key "(.*?)"')
ENDINGS: Final = (".yaml", ".yml", _JSON)
"""How names of config files end."""

_ELSEWHERE: Final = Problem(
    name="compute_environment",
    text="compute_environment AMAZON_SAGEMAKER: runs are launched on this machine only",
)

# names of older files and of the user guide, by the section and name they have now; None: without meaning today
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
class ConfigFile:
    """A config that was read.

    Attributes:
        path: of the file.
        config: what it says.
        ignored: names in it that mean nothing today.
    """

    path: Path
    config: LaunchConfig
    ignored: tuple[str, ...] = ()


def default_path() -> Path:
    """Return where Accelerate's tools and these look for a config that no one names.

    That is `accelerate/default_config.yaml` in $HF_HOME, else in `huggingface` in $XDG_CACHE_HOME, else in
    `~/.cache/huggingface`.
    """
    home = environ.get("HF_HOME")
    if not home:
        cache = environ.get("XDG_CACHE_HOME")
        home = os.path.join(cache or os.path.join("~", ".cache"), "huggingface")
    return expanded(home) / "accelerate" / "default_config.yaml"


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return the path with `~` replaced; that of a user who does not exist stays, and is told of as no file."""
    return Path(os.path.expanduser(path))


def read(path: str | os.PathLike[str]) -> ConfigFile:
    """Read a YAML or JSON file, also one that Accelerate wrote, of any version.

    Raises:
        ConfigError: all that is wrong, with file and line; nothing of the file is used then.
    """
    path = expanded(path)
    if not path.is_dir():
        _check_ending(path)
    text = _text(path)
    tree = _parse(path, text)
    if not text.strip():  # most often what a full disk or a crash left of a file
        raise ConfigError(
            [Problem(name="", text=f"{path} is empty: expected lines such as 'num_processes: 2'")]
        )
    # JSON is YAML but for how it escapes some characters
    values, moved, ignored = _in_todays_words(json.loads(text) if path.suffix == _JSON else tree)
    try:
        config = problems.check(values)
    except ConfigError as error:
        is_elsewhere = str(values.get("compute_environment")).upper() == "AMAZON_SAGEMAKER"
        wrong = [_ELSEWHERE] if is_elsewhere else error.problems  # all else follows from it
        raise ConfigError([_placed(problem, path, tree, moved) for problem in wrong]) from None
    if ignored:
        warnings.warn(f"{path}: {', '.join(ignored)} means nothing any more and is ignored", stacklevel=2)
    return ConfigFile(path=path, config=config, ignored=tuple(ignored))


def write(config: LaunchConfig, path: str | os.PathLike[str], *, replace: bool = False) -> Path:
    """Write a config, whole or not at all; a file that is there keeps its comments and its order.

    Options that Accelerate's files do not have are left out where they have their default. A link stays one.

    Args:
        config: what to write.
        path: where to.
        replace: replace a file that is there also if it is none that can be read.

    Raises:
        ConfigError: the file that is there cannot be read, or the name is none of a config file.
    """
    path = expanded(path)
    _check_ending(path)
    values = values_of(config)
    before, tree = "", CommentedMap()
    if path.exists():
        try:
            before = _text(path)
            tree = _parse(path, before)
        except ConfigError:
            if not replace or not path.is_file():
                raise
            before = ""
    if path.suffix == _JSON:
        text = json.dumps(values, indent=2) + "\n"
    else:
        _update(tree, values)
        text = _dumped(tree)
        text = _with_comments(before, text) if "#" in before else text
    _replace(Path(os.path.realpath(path)), text)
    return path


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


def _with_comments(before: str, text: str) -> str:
    """Return the text with the comments that belonged to options that moved or went."""
    moved = {path: now for path, now in _RENAMED.items() if now is not None}
    whole = comments.carried(before, text, moved)
    yaml = YAML(typ="safe")
    return whole if yaml.load(whole) == yaml.load(text) else text


def as_yaml(config: LaunchConfig) -> str:
    """Return what `write` would write to a new file."""
    tree = CommentedMap()
    _update(tree, values_of(config))
    return _dumped(tree)


def values_of(config: LaunchConfig) -> dict[str, Any]:
    """Return the options that a file holds: those that have a meaning beside the others, or were changed."""
    flat = flat_values(config)
    values: dict[str, Any] = {}
    for option in table():
        value = flat[option.name]
        shown = option.face.file and not option.face.expert and matters(option, flat)
        if value is None or (value == option.default and not shown):
            continue
        place = values
        for name in option.path[:-1]:
            place = place.setdefault(name, {})
        place[option.path[-1]] = list(value) if isinstance(value, tuple) else value
    if "parallelism_config" in values:  # which says so by itself: Accelerate has no such name
        values.pop("use_parallelism_config", None)
        if not config.use_parallelism_config:
            values["use_parallelism_config"] = False
    return values


def _quoted(value: Any) -> Any:
    """Quote words that older YAML reads as truth values, which is what Accelerate's reader does."""
    if isinstance(value, str) and value.lower() in _TRUTH_WORDS:
        return SingleQuotedScalarString(value)
    return value


def flat_values(config: LaunchConfig) -> dict[str, Any]:
    """Return the value of every option by its name."""
    found: dict[str, Any] = {}
    for option in table():
        value: Any = config
        for name in option.path:
            value = getattr(value, name)
        found[option.name] = value
    return found


def chosen_names(config: LaunchConfig) -> frozenset[str]:
    """Return the names of the options that somebody gave a value, be it the default."""
    names = set()
    for option in table():
        place: Any = config
        for name in option.path[:-1]:
            place = getattr(place, name) if name in place.model_fields_set else None
        if place is not None and option.path[-1] in place.model_fields_set:
            names.add(option.name)
    return frozenset(names)


def _check_ending(path: Path) -> None:
    if path.suffix not in ENDINGS:
        raise ConfigError([Problem(name="", text=f"{path} does not end in {', '.join(ENDINGS)}")])


def _text(path: Path) -> str:
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
    except json.JSONDecodeError as error:
        raise ConfigError([Problem(name="", text=error.msg, where=f"{path}:{error.lineno}")]) from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 0 if mark is None else mark.line + 1
        raise ConfigError([Problem(name="", text=_reason(error), where=f"{path}:{line}")]) from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        reason = f"a character that YAML has not: {text[error.position]!r}"
        raise ConfigError([Problem(name="", text=reason, where=f"{path}:{line}")]) from None
    except (YAMLError, ValueError, RecursionError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError([Problem(name="", text=f"{path} is no YAML: {reason}")]) from None
    if tree is None:
        return CommentedMap()
    if not isinstance(tree, CommentedMap):
        raise ConfigError(
            [Problem(name="", text=f"{path} holds no options: expected lines such as 'num_processes: 2'")]
        )
    return tree


def _reason(error: MarkedYAMLError) -> str:
    text = str(error.problem or error.context).strip().partition("\n")[0]
    if twice := _TWICE.match(text):
        return f"{twice[1]} stands there twice"
    return "a tab: YAML is indented with spaces" if "\\t" in text else text


def _in_todays_words(tree: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[str, ...]], list[str]]:
    """Return the values with today's names, where those that moved were, and the names without a meaning.

    What is null has its default.
    """
    values: dict[str, Any] = {}
    moved: dict[str, tuple[str, ...]] = {}
    ignored: list[str] = []
    for path, value in _leaves(tree):
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
        place[now[-1]] = value.value if _is_plain_text(value) else value
    if "parallelism_config" in values:
        values.setdefault("use_parallelism_config", True)
    return values, moved, ignored


def _is_plain_text(value: Any) -> bool:
    """Return True for a text that is marked as one: `!!str no`."""
    return isinstance(value, TaggedScalar) and str(value.tag) == "tag:yaml.org,2002:str"


def _leaves(tree: Mapping[str, Any]) -> list[tuple[tuple[str, ...], Any]]:
    sections = {option.path[0] for option in table() if len(option.path) > 1}
    found: list[tuple[tuple[str, ...], Any]] = []
    for name, value in tree.items():
        if name in sections and isinstance(value, Mapping):
            found += [((name, key), inner) for key, inner in value.items()]
        else:
            found.append(((name,), value))
    return found


def _placed(problem: Problem, path: Path, tree: Any, moved: Mapping[str, tuple[str, ...]]) -> Problem:
    names = moved.get(problem.name) or tuple(problem.name.split("."))
    line = 0
    for name in names:
        if not isinstance(tree, CommentedMap) or name not in tree:
            break
        if name in (tree.lc.data or {}):  # else it is merged from another place
            line = tree.lc.key(name)[0] + 1
        tree = tree[name]
    return replace(problem, where=f"{path}:{line}" if line else str(path))


def _update(tree: Any, values: Mapping[str, Any]) -> None:
    """Make the tree say what the values say, with the lines it has where they are right."""
    for name in [name for name in tree if name not in values]:
        del tree[name]
    for name, value in values.items():
        if isinstance(value, Mapping) and isinstance(tree.get(name), CommentedMap):
            _update(tree[name], value)
        elif isinstance(value, Mapping):
            tree[name] = CommentedMap()
            _update(tree[name], value)
        elif name not in tree or tree[name] != value or (isinstance(value, float) and "e" in repr(value)):
            tree[name] = _quoted(value)  # an exponent as it was written may lose its number's last digit


def _dumped(tree: Any) -> str:
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 4096
    file = io.StringIO()
    yaml.dump(tree, file)
    return file.getvalue()
