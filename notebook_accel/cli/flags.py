"""Flags of the command line, made from the schema: an option is written once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Final

import rich_click as click
from click.shell_completion import CompletionItem

from .. import environ
from ..config.option import Option, as_text, read_number
from ..config.schema import LaunchConfig, section_title, table

SHORT: Final = {"tee": ("-t",)}
"""Short spellings of flags."""
_KINDS: Final = {int: "INT", float: "FLOAT", bool: "BOOL", str: "TEXT", tuple: "TEXT"}

_OTHERS: Final = "Other options"

PARADIGMS: Final = {
    "multi_gpu": ("MULTI_GPU", "A process for each GPU."),
    "use_fsdp": ("FSDP", "Models sharded by torch's FSDP."),
    "use_deepspeed": ("DEEPSPEED", "Training by DeepSpeed."),
    "use_megatron_lm": ("MEGATRON_LM", "Training by Megatron-LM."),
    "tpu": ("XLA", "A process for each TPU chip."),
}
"""Flags that only choose a distributed_type: the type, and the help of the flag."""

_PANELS: Final[Mapping[str, tuple[str, ...]]] = {
    "Command": ("config_file", "dry_run", "quiet", "module", "no_python", "ask", "all", "overwrite", "help"),
    "Hardware": ("use_cpu", "gpu_ids", "multi_gpu", "tpu"),
    "Resources": (
        "num_processes",
        "num_machines",
        "machine_rank",
        "main_process_ip",
        "main_process_port",
        "rdzv_backend",
        "num_cpu_threads_per_process",
        "max_restarts",
    ),
    "Training": ("mixed_precision", "gradient_accumulation_steps", "debug"),
}
"""The panels of help for flags of no section, with the names of their options; panels of sections come below."""


def normalize(name: str) -> str:
    """Return a flag's one spelling: `--num_processes` is `--num-processes` too."""
    return name.replace("_", "-")


def settings() -> dict[str, Any]:
    """Return click's settings for a command with these flags: both spellings, and the panels of its help."""
    shown = [option for option in options() if not is_hidden(option)]
    own = {option.name: f"--{normalize(str(option.face.flag))}" for option in options()}
    panels = {
        title: [own.get(name, f"--{normalize(name)}") for name in names] for title, names in _PANELS.items()
    }
    told = {flag for names in panels.values() for flag in names}
    for option in options():
        if (title := section_title(option)) and title not in panels:
            choosing = [
                f"--{normalize(flag)}"
                for flag in PARADIGMS
                if flag.endswith(option.path[0].removesuffix("_config"))
            ]
            panels[title] = choosing
        if option in shown and own[option.name] not in told:
            panels.setdefault(title or _OTHERS, []).append(own[option.name])
    panels[_OTHERS] = panels.pop(_OTHERS, [])  # the last one
    groups = [{"name": title, "options": names} for title, names in panels.items()]
    return {
        "token_normalize_func": normalize,
        "rich_help_config": {
            "option_groups": {"*": groups},
            "options_table_column_types": ["opt_short", "opt_long", "help"],
        },
    }


def is_hidden(option: Option) -> bool:
    """Return whether help leaves an option out: an expert option, and one that has an effect beside such a one only."""
    known = {one.name: one for one in table()}
    return option.face.expert or any(known[name].face.expert for name in option.face.when)


class FlagCommand(click.RichCommand):
    """A command whose switches may have a value, as in `--debug` and `--debug false`.

    A switch takes the next word only where that is a truth word: `--debug train.py` is `--debug` and a script.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, complete_switches(self, ctx, args))

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the flags; for completion in both spellings, because it compares words as the user typed them."""
        found: list[click.Parameter] = super().get_params(ctx)
        return [_in_both_spellings(parameter) for parameter in found] if ctx.resilient_parsing else found

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        found: list[CompletionItem] = super().shell_complete(ctx, incomplete)
        return [
            item
            for item in found
            if "_" in incomplete or not item.value.startswith("--") or "_" not in item.value
        ]


def options() -> list[Option]:
    """Return the options that have a flag; of several with the same flag the first one."""
    named = {str(option.face.flag): option for option in reversed(table()) if option.face.flag is not None}
    return [option for option in table() if named.get(str(option.face.flag)) is option]


def is_switch(option: Option) -> bool:
    """Return True if a flag needs no value."""
    return option.kind is bool and option.choices is None


def is_repeatable(option: Option) -> bool:
    """Return True if a flag may be given several times."""
    return option.kind is tuple and option.name != "fp8_config.override_linear_precision"


def add_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command a flag for every option of the schema, in both spellings, `--num_processes` and `--num-processes`.

    The command gets the values as texts, by the options' names with `__` for `.`, and None for a flag that was not
    given. `apply` makes a config of them.
    """
    for option in reversed(options()):
        flag = str(option.face.flag)
        extra: dict[str, Any] = {"is_flag": False, "flag_value": "true"} if is_switch(option) else {}
        if is_repeatable(option):
            extra = {"multiple": True}
        command = click.option(
            *SHORT.get(flag, ()),
            f"--{normalize(flag)}",
            option.name.replace(".", "__"),
            type=str,
            metavar=_KINDS[option.kind],
            help=_help(option),
            hidden=is_hidden(option),
            shell_complete=_completer(option),
            **extra,
        )(command)
    return command


def _in_both_spellings(parameter: click.Parameter) -> click.Parameter:
    found = copy.copy(parameter)
    flags = [f"--{name[2:].replace('-', '_')}" for name in parameter.opts if name.startswith("--")]
    found.opts = list(dict.fromkeys([*parameter.opts, *flags]))
    return found


def _completer(option: Option) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Return what completes the value of an option: its words, or files where any text is legal or none is needed."""

    def complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        if option.choices is None and option.kind in (str, bool):
            return [CompletionItem(incomplete, type="file")]
        words = [as_text(choice) for choice in option.choices or ()]
        return [CompletionItem(word) for word in words if word.lower().startswith(incomplete.lower())]

    return complete


def parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags that were given, as nested values of a config.

    A flag that several options have sets all of them that can have its value.

    Args:
        values: texts by the names of the options with `__` for `.`, None where a flag was not given.
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
        place[option.path[-1]] = read_value(option, text)
    return found


def read_value(option: Option, text: Any) -> Any:
    """Return the value of a config that a flag's text is; the text itself where it is none.

    Args:
        option: that of the flag.
        text: as it was typed; several for a flag that may be given several times.
    """
    if option.kind is tuple:
        return text.split(",") if isinstance(text, str) else text
    if option.choices is None:
        return read_number(option, text)
    return next((choice for choice in option.choices or () if as_text(choice) == text), text)


def apply(config: LaunchConfig, values: Mapping[str, Any]) -> LaunchConfig:
    """Return a config with flags on top of it.

    Args:
        config: what flags change.
        values: as in `parse`.

    Raises:
        ConfigError: a flag has a wrong value.
    """
    merged = config.model_dump()
    for name, value in parse(values).items():
        merged[name] = {**merged[name], **value} if isinstance(value, Mapping) else value
    return LaunchConfig.model_validate(merged)


def _help(option: Option) -> str:
    words = ", ".join(map(as_text, option.choices or ()))
    choices = f" One of {words}." if words else ""
    facts = [] if words or is_switch(option) else [_KINDS[option.kind]]
    if option.default is not None and option.default not in ("", ()):
        facts.append(f"default: {as_text(option.default)}")
    told = f" [{', '.join(facts)}]" if facts else ""
    return f"{option.help}{choices}{told}"


def complete_switches(command: click.Command, ctx: click.Context, args: list[str]) -> list[str]:
    """Return the words with a value for each switch, and with `--` before the first word that is no option.

    Args:
        command: has the flags.
        ctx: of a call of it.
        args: words as they are typed.
    """
    switches, takers = set[str](), set[str]()
    for parameter in command.get_params(ctx):
        if isinstance(parameter, click.Option) and not parameter.is_flag:
            optional = parameter.flag_value == "true"
            (switches if optional else takers).update((*parameter.opts, *parameter.secondary_opts))
    completed: list[str] = []
    words = iter(enumerate(args))
    for index, word in words:
        following = args[index + 1] if index + 1 < len(args) else None
        if word == "--":
            return [*completed, *args[index:]]
        if not word.startswith("-") and not ctx.allow_interspersed_args:
            return [*completed, "--", *args[index:]]
        flag = normalize(word) if word.startswith("--") else word
        if flag in switches:
            is_told = following is not None and _is_truth(following)
            completed.append(f"{word}={following if is_told else 'true'}")
            if is_told:
                next(words)
        elif flag in takers and following is not None:
            completed += [word, following]
            next(words)
        else:
            completed.append(word)
    return completed


def _is_truth(word: str) -> bool:
    try:
        environ.parse_bool(word)
    except ValueError:
        return False
    return word != ""
