"""An option: a row of the table, and what its faces have to know of it. Nothing here imports pydantic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from typing_extensions import dataclass_transform

from .argument_checks import Check

Launches = Literal["all", "notebooks", "scripts"]
Rules: TypeAlias = Mapping[str, tuple[Any, ...]]
Bounds: TypeAlias = Mapping[str, Any]

_NAME = "="  # "as the option is called"


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """How an option is given to `notebook_launcher`.

    Attributes:
        name: of the argument; empty where it is the option's.
        help: what the argument does, where that is not what the option's help says.
        default: the argument's default; `...` where it is the option's.
        convert: returns the argument for the option's value and the values of all options by name; None where the
            argument has the option's value.
        check: yields what is wrong with an argument; None checks it by the option's type, words and bounds.
        any_case: whether words may be spelled in any case.
        variable: the environment variable that decides where the argument has its default; None where none does.
    """

    name: str = ""
    help: str = ""
    default: Any = ...
    convert: Callable[[Any, Mapping[str, Any]], Any] | None = None
    check: Check | None = None
    any_case: bool = False
    variable: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """An option as the table says it.

    Attributes:
        default: its value where nobody chose one.
        help: what it does, a sentence or two.
        when: values of other options under which it has an effect, such as `{"distributed_type": ("FSDP",)}`, where
            `!X` is all but X and `>1` all above 1; empty where it always has one.
        env: the variable that tells workers; None is the section's prefix and the name, empty is none.
        flag: its flag without dashes; None where the command line has none.
        file: whether files hold it with its default too; Accelerate's reader refuses names that it does not have.
        expert: questionnaire and form leave it out unless all options are asked for.
        quiet: workers are not told of a default that nobody chose.
        spaces: whether spaces at the ends of a typed text belong to it.
        launches: the launches that it has an effect on; one for notebooks alone has no flag.
        engines: the engines that it has an effect on; empty for all.
        argument: how `notebook_launcher` takes it; None where it does not.
        bounds: `ge`, `gt`, `le` and `lt` of numbers, `pattern` of texts.
    """

    default: Any
    help: str
    when: Rules = field(default_factory=dict)
    env: str | None = None
    flag: str | None = _NAME
    file: bool = True
    expert: bool = False
    quiet: bool = False
    spaces: bool = False
    launches: Launches = "all"
    engines: tuple[str, ...] = ()
    argument: Argument | None = None
    bounds: Bounds = field(default_factory=dict)


def option(
    default: Any,
    help: str,
    *,
    when: Rules | None = None,
    env: str | None = None,
    flag: str | None = _NAME,
    file: bool = True,
    expert: bool = False,
    quiet: bool = False,
    spaces: bool = False,
    launches: Launches = "all",
    engines: tuple[str, ...] = (),
    argument: Argument | None = None,
    **bounds: Any,
) -> Any:
    """Return the row of an option; `bounds` are `ge=1`, `pattern=...`, the rest as in `Row`."""
    return Row(
        default=default,
        help=help,
        when=dict(when or {}),
        env=env,
        flag=flag,
        file=file,
        expert=expert,
        quiet=quiet,
        spaces=spaces,
        launches=launches,
        engines=engines,
        argument=argument,
        bounds=bounds,
    )


@dataclass_transform(kw_only_default=True)
class Rows:
    """A class whose fields are rows: the part of a schema that needs no pydantic."""


def rows_of(schema: type) -> dict[str, Row]:
    """Return the rows of a schema by name, those of its bases first."""
    return {
        name: row
        for base in reversed(schema.__mro__)
        for name, row in {**vars(base), **vars(base).get("rows", {})}.items()
        if isinstance(row, Row)
    }


@dataclass(frozen=True, slots=True)
class Read:
    """Makes of a value the one that is checked, in an annotation: `Annotated[int, Read(function)]`.

    Attributes:
        function: returns the value to check; ValueError says in words why there is none.
    """

    function: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(self.function, handler(source))


def any_case(**aliases: Any) -> Read:
    """Let a choice be spelled in any case, and old spellings stand for new ones: `any_case(tpu="XLA")`."""

    def change(value: Any) -> Any:
        text = str(value.value if isinstance(value, Enum) else value)
        return aliases.get(text.lower(), text.upper() if isinstance(value, str) else value)

    return Read(change)


@dataclass(frozen=True, kw_only=True, slots=True)
class Face:
    """How an option shows itself; the fields are those of `Row`, with what the section adds to them."""

    when: Rules
    env: str | None
    flag: str | None
    file: bool
    expert: bool
    quiet_default: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """An option of the schema.

    Attributes:
        path: names of the sections and the field, as in the file.
        name: the path as text: `fsdp_config.fsdp_version`.
        help: what it does, a sentence or two.
        default: its value where nobody chose one.
        choices: the legal values, None where there are too many.
        kind: bool, int, float, str, tuple or dict.
        optional: whether None is legal.
        row: what the table says of it.
        face: how it shows itself.
        argument: the name of the argument of `notebook_launcher`; empty where it has none.
        argument_default: the default of that argument.
    """

    path: tuple[str, ...]
    name: str
    help: str
    default: Any
    choices: tuple[Any, ...] | None
    kind: type
    optional: bool
    row: Row
    face: Face
    argument: str
    argument_default: Any


def options_of(schema: type, path: tuple[str, ...] = ()) -> Iterator[Option]:
    """Yield every option of a schema and of its sections, in the order of definition."""
    rows = rows_of(schema)
    for name, annotation in _annotations(schema).items():
        if name not in rows:
            yield from options_of(annotation, (*path, name))
            continue
        row = rows[name]
        kind, choices, optional = _kind(annotation)
        argument = row.argument
        yield Option(
            path=(*path, name),
            name=".".join((*path, name)),
            help=row.help,
            default=row.default,
            choices=choices,
            kind=kind,
            optional=optional,
            row=row,
            face=_face(schema, name, row, path),
            argument="" if argument is None else argument.name or name,
            argument_default=_argument_default(row),
        )


def _argument_default(row: Row) -> Any:
    return row.default if row.argument is None or row.argument.default is ... else row.argument.default


def _annotations(schema: type) -> dict[str, Any]:
    """Return the types of a schema's fields by name; pydantic has resolved those of its own classes."""
    fields = getattr(schema, "model_fields", None)
    if fields is None:
        return get_type_hints(schema, include_extras=True)
    return {name: field.annotation for name, field in fields.items()}


def _face(schema: type, name: str, row: Row, path: tuple[str, ...]) -> Face:
    stem = name.removeprefix(getattr(schema, "prefix", ""))
    flag = getattr(schema, "flag_prefix", "") + stem if row.flag == _NAME else row.flag
    env = row.env
    if env is None and (prefix := getattr(schema, "env_prefix", None)) is not None:
        env = prefix + stem.upper()
    return Face(
        when={**getattr(schema, "when", {}), **row.when},
        env=env or None,
        flag=None if row.launches == "notebooks" else flag,
        file=row.file,
        expert=row.expert or getattr(schema, "expert", False),
        quiet_default=not path or row.quiet,
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


def as_text(value: Any) -> str:
    """Return a value as variables and flags hold it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (tuple, list)):
        return ",".join(map(as_text, value))
    if isinstance(value, Mapping):
        return ",".join(f"{key}={as_text(inner)}" for key, inner in value.items())
    return str(value)


def as_texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return values by name, each as variables hold it."""
    return {name: as_text(value) for name, value in values.items()}


def read_number(option: Option, text: str) -> Any:
    """Return a typed text as the number that a file would hold, where the option is one; else the text."""
    if option.kind in (int, float):
        for number in (int, float):
            try:
                return number(text)
            except ValueError:
                continue
    return text
