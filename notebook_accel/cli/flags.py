"""Flags of the command line, made from the schema: an option is written once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import rich_click as click

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


def options() -> list[Option]:
    """Return the options that have a flag; of those that share one, the first."""
    found: dict[str, Option] = {}
    for option in table():
        if option.face.flag is not None:
            found.setdefault(option.face.flag, option)
    return list(found.values())


def add_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command a flag for every option of the schema, in both spellings, `--num_processes` and `--num-processes`.

    Values arrive as texts, by the options' names with `.` as `__`, and None where a flag was not given: `chosen`
    makes a config of them.
    """
    for option in reversed(options()):
        flag = str(option.face.flag)
        spellings = dict.fromkeys((f"--{flag.replace('_', '-')}", f"--{flag}"))
        switch = option.kind is bool and option.choices is None
        extra: dict[str, Any] = {"is_flag": False, "flag_value": "true"} if switch else {}
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
    """Return the flags that were given, as nested values of a config."""
    texts = {option.face.flag: values.get(option.name.replace(".", "__")) for option in options()}
    found: dict[str, Any] = {}
    for option in table():
        text = texts.get(option.face.flag)
        if option.face.flag is None or text is None or text == ():
            continue
        place = found
        for name in option.path[:-1]:
            place = place.setdefault(name, {})
        place[option.path[-1]] = text.split(",") if option.kind is tuple and isinstance(text, str) else text
    return found


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
