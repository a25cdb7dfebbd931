"""Flags of the command line, made from the schema: an option is written once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import rich_click as click

from .. import environ
from ..config import problems
from ..config.option import Option, as_text
from ..config.schema import LaunchConfig, table

_SECTIONS: Final = {
    "dynamo_config": "torch.compile",
    "fsdp_config": "FSDP",
    "deepspeed_config": "DeepSpeed",
    "fp8_config": "Float8",
    "parallelism_config": "Parallelism",
    "megatron_lm_config": "Megatron-LM",
    "mpirun_config": "MPI",
}

_SHORT: Final = {"tee": ("-t",)}


class FlagCommand(click.RichCommand):
    """A command whose switches can be told yes or no, as in `--debug` and `--debug false`.

    A switch takes the next word only where that is a truth word: in `--debug train.py` it does not.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _settled(self, ctx, args))


def options() -> list[Option]:
    """Return the options that have a flag, of several with the same flag the first."""
    named = {str(option.face.flag): option for option in reversed(table()) if option.face.flag is not None}
    return [option for option in table() if named.get(str(option.face.flag)) is option]


def is_switch(option: Option) -> bool:
    """Return True if a flag needs no value."""
    return option.kind is bool and option.choices is None


def add_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command a flag for every option of the schema, in both spellings, `--num_processes` and `--num-processes`.

    Values arrive as texts, by the options' names with `.` as `__`, and None where a flag was not given: `chosen`
    makes a config of them.
    """
    for option in reversed(options()):
        flag = str(option.face.flag)
        spellings = dict.fromkeys((*_SHORT.get(flag, ()), f"--{flag.replace('_', '-')}", f"--{flag}"))
        extra: dict[str, Any] = {"is_flag": False, "flag_value": "true"} if is_switch(option) else {}
        if option.kind is tuple and option.name != "fp8_config.override_linear_precision":
            extra = {"multiple": True}
        command = click.option(
            *spellings,
            option.name.replace(".", "__"),
            type=str,
            metavar="|".join(map(as_text, option.choices))
            if option.choices
            else option.kind.__name__.upper(),
            help=_help(option),
            hidden=option.face.expert,
            **extra,
        )(command)
    return command


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags that were given, as nested values of a config.

    A flag that several options have is for all of them that can have its value.
    """
    texts = {str(option.face.flag): values.get(option.name.replace(".", "__")) for option in options()}
    found: dict[str, Any] = {}
    for option in table():
        text = texts.get(str(option.face.flag))
        if text is None or text == () or (text == "auto" and option.path == ("gradient_accumulation_steps",)):
            continue  # only DeepSpeed knows "auto"
        place = found
        for name in option.path[:-1]:
            place = place.setdefault(name, {})
        place[option.path[-1]] = _value(option, text)
    return found


def _value(option: Option, text: Any) -> Any:
    if option.kind is tuple:
        return text.split(",") if isinstance(text, str) else text
    if option.kind in (int, float) and option.choices is None:
        try:
            return option.kind(text)
        except ValueError:
            return text  # refused as what it is
    return next((choice for choice in option.choices or () if as_text(choice) == text), text)


def chosen(config: LaunchConfig, values: Mapping[str, Any]) -> LaunchConfig:
    """Return the config with the flags on top of it; ConfigError for wrong ones."""
    merged = config.model_dump()
    for name, value in given(values).items():
        merged[name] = {**merged[name], **value} if isinstance(value, Mapping) else value
    return problems.check(merged)


def _help(option: Option) -> str:
    default = (
        ""
        if option.default is None or option.default in ("", ())
        else f" [default: {as_text(option.default)}]"
    )
    section = f"{_SECTIONS[option.path[0]]}: " if len(option.path) > 1 else ""
    return f"{section}{option.help}{default}"


def _settled(command: click.Command, ctx: click.Context, args: list[str]) -> list[str]:
    """Return the words with a value for each switch, and the first argument marked where options end with it."""
    switches, takers = set[str](), set[str]()
    for parameter in command.get_params(ctx):
        if isinstance(parameter, click.Option) and not parameter.is_flag:
            optional = parameter.flag_value == "true"
            (switches if optional else takers).update((*parameter.opts, *parameter.secondary_opts))
    settled: list[str] = []
    words = iter(enumerate(args))
    for index, word in words:
        following = args[index + 1] if index + 1 < len(args) else None
        if word == "--":
            return [*settled, *args[index:]]
        if not word.startswith("-") and not ctx.allow_interspersed_args:
            return [*settled, "--", *args[index:]]
        if word in switches:
            is_told = following is not None and _is_truth(following)
            settled.append(f"{word}={following if is_told else 'true'}")
            if is_told:
                next(words)
        elif word in takers and following is not None:
            settled += [word, following]
            next(words)
        else:
            settled.append(word)
    return settled


def _is_truth(word: str) -> bool:
    try:
        environ.parse_bool(word)
    except ValueError:
        return False
    return word != ""
