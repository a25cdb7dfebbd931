"""LaunchConfig: every option of a launch, checked once, and what can be asked of all options."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import model_validator

from ..caller import warn
from ..errors import ConfigError
from . import document, problems
from .document import Document
from .launch_options import LaunchOptions
from .option import Option, options_of
from .sections import (
    DeepSpeedConfig,
    DynamoConfig,
    FP8Config,
    FSDPConfig,
    MegatronConfig,
    MPIConfig,
    ParallelismSizes,
    Section,
)


class LaunchConfig(Section, LaunchOptions):
    """What to start, on what, and how models are trained there.

    Frozen; `with_options` makes others. The names are those of Accelerate's config
    files; what those do not have is left out of files where it has its default.

    Raises:
        ConfigError: lists everything that is wrong.
    """

    dynamo_config: DynamoConfig = DynamoConfig()
    fsdp_config: FSDPConfig = FSDPConfig()
    deepspeed_config: DeepSpeedConfig = DeepSpeedConfig()
    fp8_config: FP8Config = FP8Config()
    parallelism_config: ParallelismSizes = ParallelismSizes()
    megatron_lm_config: MegatronConfig = MegatronConfig()
    mpirun_config: MPIConfig = MPIConfig()

    @model_validator(mode="wrap")
    @classmethod
    def _in_sentences(cls, values: Any, make: Callable[[Any], LaunchConfig]) -> LaunchConfig:
        if not isinstance(values, Mapping):
            return make(values)
        return problems.validate(make, _split_range(values), table())

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> LaunchConfig:
        """Return the config in a file.

        Args:
            path: of a YAML or JSON file, also of one that Accelerate wrote, of any version.

        Raises:
            ConfigError: lists everything that is wrong, with file and line; nothing of the file is used then.
        """
        return cls.of_document(document.read(path, section_names()))

    @classmethod
    def of_document(cls, found: Document) -> LaunchConfig:
        """Return the config that a document says, and warn of names that mean nothing any more.

        Raises:
            ConfigError: lists everything that is wrong, with file and line.
        """
        try:
            config = cls.model_validate(found.values)
        except ConfigError as error:
            raise ConfigError(found.locate(error.problems)) from None
        if found.ignored:
            names = ", ".join(found.ignored)
            warn(f"{found.path}: {names} means nothing any more and is ignored")
        return config

    def write(self, path: str | os.PathLike[str], *, replace: bool = False) -> Path:
        """Write the config to a file, whole or not at all; a file that is there keeps its comments and its order.

        Options that Accelerate's files do not have are left out where they have their default. A link stays one.

        Args:
            path: where to.
            replace: replace a file that is there also if it is none that can be read.

        Returns:
            The path, with `~` replaced.

        Raises:
            ConfigError: the file that is there cannot be read, or the name is none of a config file.
        """
        return document.write(file_values(self), path, replace=replace)

    def with_options(self, **options: Any) -> LaunchConfig:
        """Return another config with these options changed; ConfigError for wrong ones."""
        return type(self).model_validate({**self.model_dump(exclude_unset=True), **options})

    def misfits(self) -> Iterator[str]:
        """Yield a sentence for each pair of options that contradict each other; it begins with the name of one."""
        if self.num_processes is not None and self.num_processes % self.num_machines:
            yield f"num_processes {self.num_processes} is no multiple of num_machines {self.num_machines}"
        if self.machine_rank >= self.num_machines:
            yield f"machine_rank {self.machine_rank} >= num_machines {self.num_machines}: ranks count from 0"
        if self.min_machines is not None and self.min_machines > self.num_machines:
            yield f"min_machines {self.min_machines} > num_machines {self.num_machines}"


def _split_range(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return values in which a range of nodes, `num_machines: 1:4`, is two options."""
    number = values.get("num_machines")
    least, colon, most = number.partition(":") if isinstance(number, str) else ("", "", "")
    return {**values, "min_machines": least.strip(), "num_machines": most.strip()} if colon else values


@functools.cache
def table() -> tuple[Option, ...]:
    """Return every option, in the order of the schema."""
    return tuple(options_of(LaunchConfig))


@functools.cache
def section_names() -> frozenset[str]:
    """Return the names of all sections."""
    return frozenset(option.path[0] for option in table() if len(option.path) > 1)


def section_title(option: Option) -> str:
    """Return what the section of an option is called: its docstring's first line; empty for an option of none."""
    if len(option.path) == 1:
        return ""
    section: Any = LaunchConfig.model_fields[option.path[0]].annotation
    return str(section.__doc__).partition("\n")[0].rstrip(".")


def flat_values(config: LaunchConfig) -> dict[str, Any]:
    """Return the value of every option by its name."""
    values: dict[str, Any] = {}
    for option in table():
        value: Any = config
        for name in option.path:
            value = getattr(value, name)
        values[option.name] = value
    return values


def file_values(config: LaunchConfig) -> dict[str, Any]:
    """Return the nested values that a file holds: of options that have an effect, and of those that were changed."""
    flat = flat_values(config)
    values: dict[str, Any] = {}
    for option in table():
        value = flat[option.name]
        is_shown = option.face.file and not option.face.expert and has_effect(option, flat)
        if value is None or (value == option.default and not is_shown):
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


def values_for_workers(config: LaunchConfig, chosen: Collection[str]) -> dict[str, Any]:
    """Return the values that workers get as variables, by the names of the variables.

    Args:
        config: all options.
        chosen: the names of the options that somebody gave a value, be it the default.
    """
    values = flat_values(config)
    found: dict[str, Any] = {}
    for option in table():
        value = values[option.name]
        if option.face.env is None or value is None:
            continue
        if option.name in chosen:
            is_wanted = has_effect(option, values, but_for=option.path[0])
        else:
            is_quiet = option.face.quiet_default and value == option.default
            is_wanted = not is_quiet and has_effect(option, values)
        if is_wanted:
            found[option.face.env] = value
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


@functools.cache
def _by_name() -> dict[str, Option]:
    return {option.name: option for option in table()}


def has_effect(option: Option, values: Mapping[str, Any], *, but_for: str = "") -> bool:
    """Return whether an option has an effect beside the values of the others.

    Args:
        option: that is asked about.
        values: of all options, by name.
        but_for: a section whose options count as if they had the right values; empty for none.
    """
    return all(
        any(_follows(values.get(name), rule) for rule in rules)
        and has_effect(_by_name()[name], values, but_for=but_for)
        for name, rules in option.face.when.items()
        if name.partition(".")[0] != but_for
    )


def _follows(value: Any, rule: Any) -> bool:
    """Return whether a value is the rule itself, is not X where the rule is `!X`, or is larger where it is `>1`."""
    if isinstance(rule, str) and rule.startswith("!"):
        return bool(value != rule[1:])
    if isinstance(rule, str) and rule.startswith(">"):
        return value is not None and bool(value > int(rule[1:]))
    return bool(value == rule)
