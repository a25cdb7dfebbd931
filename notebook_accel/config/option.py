"""An option: a field of the schema with all that its faces need to know of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo


class Section(BaseModel):
    """Options that belong together.

    Subclasses say how their options are called elsewhere: `prefix` is what their names begin with in the file,
    `flag_prefix` what their flags begin with in place of it, `env_prefix` what their variables begin with.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Face:
    """How an option shows itself.

    Attributes:
        when: values of other options under which it has a meaning, such as `{"distributed_type": ("FSDP",)}`, where
            `!X` is all but X and `>1` all above 1; empty where it always has one.
        env: the variable that tells workers; None where there is none.
        flag: its flag without dashes; None where the command line has none.
        file: whether files hold it with its default too; Accelerate's reader refuses names that it does not have.
        expert: questionnaire and form leave it out unless all options are asked for.
        quiet_default: workers are not told of a default that nobody chose, so that what the user's own environment says
            counts, or the default of the library that reads it.
    """

    when: Mapping[str, tuple[Any, ...]]
    env: str | None
    flag: str | None
    file: bool
    expert: bool
    quiet_default: bool


_NAME = "="  # "as the option is called"


def option(
    default: Any,
    help: str,
    *,
    when: Mapping[str, tuple[Any, ...]] | None = None,
    env: str | None = None,
    flag: str | None = _NAME,
    file: bool = True,
    expert: bool = False,
    quiet: bool = False,
    **checks: Any,
) -> Any:
    """Return a field with its help text, its checks (`ge=1`, `pattern=...`) and its faces."""
    extra: Any = {"when": dict(when or {}), "env": env, "flag": flag, "file": file, "expert": expert}
    extra["quiet"] = quiet
    return Field(default=default, description=help, json_schema_extra=extra, **checks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """An option of the schema.

    Attributes:
        path: names of the sections and the field, as in the file.
        help: what it does, a sentence or two.
        default: its value where nobody chose one.
        choices: the legal values, None where there are too many.
        kind: bool, int, float, str or list.
        optional: whether None is legal.
        field: pydantic's own description.
        face: how it shows itself.
    """

    path: tuple[str, ...]
    help: str
    default: Any
    choices: tuple[Any, ...] | None
    kind: type
    optional: bool
    field: FieldInfo
    face: Face

    @property
    def name(self) -> str:
        """The path as text: `fsdp_config.fsdp_version`."""
        return ".".join(self.path)


def options_of(schema: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[Option]:
    """Yield every option of a schema and of its sections, in the order of definition."""
    for name, field in schema.model_fields.items():
        kind, choices, optional = _kind(field.annotation)
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from options_of(kind, (*path, name))
            continue
        extra: Any = field.json_schema_extra or {}
        yield Option(
            path=(*path, name),
            help=field.description or "",
            default=field.get_default(),
            choices=choices,
            kind=kind,
            optional=optional,
            field=field,
            face=_face(schema, name, extra, path),
        )


def _face(schema: type[BaseModel], name: str, extra: dict[str, Any], path: tuple[str, ...]) -> Face:
    stem = name.removeprefix(getattr(schema, "prefix", ""))
    flag = extra.get("flag", _NAME)
    env = extra.get("env")
    if env is None and getattr(schema, "env_prefix", None) is not None:
        env = schema.env_prefix + stem.upper()  # type: ignore[attr-defined]
    return Face(
        when={**getattr(schema, "when", {}), **extra.get("when", {})},
        env=env or None,
        flag=getattr(schema, "flag_prefix", "") + stem if flag == _NAME else flag,
        file=extra.get("file", True),
        expert=extra.get("expert", False) or getattr(schema, "expert", False),
        quiet_default=not path or extra.get("quiet", False),
    )


def _kind(annotation: Any) -> tuple[Any, tuple[Any, ...] | None, bool]:
    """Return the type, the legal values where they are few, and whether None is one."""
    if get_origin(annotation) is Annotated:
        return _kind(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        values = get_args(annotation)
        return type(values[0]), values, False
    if get_origin(annotation) in (Union, UnionType):
        parts = [part for part in get_args(annotation) if part is not type(None)]
        optional = len(parts) < len(get_args(annotation))
        kind, choices, _ = _kind(parts[0])
        words = tuple(word for part in parts[1:] for word in get_args(part))
        if kind is bool and words:
            choices = (True, False)
        return kind, None if choices is None else (*choices, *words), optional
    return get_origin(annotation) or annotation, None, False


def spelled(**aliases: Any) -> BeforeValidator:
    """Let a choice be spelled in any case, and old spellings stand for new ones: `spelled(tpu="XLA")`."""

    def change(value: Any) -> Any:
        text = str(value)
        return aliases.get(text.lower(), text.upper() if isinstance(value, str) else value)

    return BeforeValidator(change)


def as_text(value: Any) -> str:
    """Return a value as variables and flags hold it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (tuple, list)):
        return ",".join(map(as_text, value))
    if isinstance(value, Mapping):
        return ",".join(f"{key}={as_text(inner)}" for key, inner in value.items())
    return str(value)


def read_number(option: Option, text: str) -> Any:
    """Return a typed text as the number that a file would hold, where the option is one; else the text."""
    if option.kind in (int, float):
        for number in (int, float):
            try:
                return number(text)
            except ValueError:
                continue
    return text
