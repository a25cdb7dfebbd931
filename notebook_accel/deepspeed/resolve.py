"""Resolves the plugins of an accelerator, and the arguments that both it and DeepSpeed's config have."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from .. import environ, probes
from ..handlers import GradientAccumulationPlugin
from .config import AUTO
from .library import NOT_INSTALLED
from .plugin import DeepSpeedPlugin
from .plugin_set import PluginSet

_ONLY: Final = "default"


def resolve_plugins(plugin: Any, plugins: Any, earlier: PluginSet | None) -> PluginSet | None:
    """Return the plugins of an accelerator: the arguments, else the earlier ones, else the environment's.

    Args:
        plugin: the argument `deepspeed_plugin`: a plugin or a dict of them, None where it was not given.
        plugins: the argument `deepspeed_plugins`, likewise.
        earlier: the plugins of an earlier accelerator, None without one.

    Returns:
        None where DeepSpeed does not train.

    Raises:
        TypeError: the argument is neither a plugin nor a dict of them.
        ValueError: both arguments were given, or they differ from the earlier plugins.
    """
    if plugin is not None and plugins is not None:
        raise ValueError("deepspeed_plugin and deepspeed_plugins are the same: leave one out")
    given = plugins if plugin is None else plugin
    if given is None and (earlier is not None or not environ.flag("ACCELERATE_USE_DEEPSPEED")):
        return earlier
    by_name = _by_name(DeepSpeedPlugin() if given is None else given)
    if earlier is not None:
        if dict(earlier) != by_name:
            raise ValueError(
                "deepspeed_plugin comes too late: the first Accelerator has another. Give it all plugins as a dict, "
                "and choose by AcceleratorState().select_deepspeed_plugin(name)"
            )
        return earlier
    for item in by_name.values():
        item._unselect()
    return PluginSet(by_name)


def _by_name(given: Any) -> dict[str, DeepSpeedPlugin]:
    by_name = dict(given) if isinstance(given, Mapping) else {_ONLY: given}
    wrong = [f"{name}: {item!r}" for name, item in by_name.items() if not isinstance(item, DeepSpeedPlugin)]
    if wrong or not by_name:
        raise TypeError(
            f"deepspeed_plugin is a DeepSpeedPlugin or a dict of them, not {', '.join(wrong) or 'an empty dict'}"
        )
    return by_name


def check_variables(environment: Mapping[str, str], mixed_precision: str, *, here: bool) -> list[str]:
    """Return a sentence for each reason why workers with these variables could not train by DeepSpeed.

    Args:
        environment: the variables of a worker.
        mixed_precision: of the launch: `no`, `fp16`, `bf16` or `fp8`. `no` is also the default of a launch, so it is
            not compared with the config.
        here: whether the workers run on this machine. Only then does it matter if DeepSpeed is installed here.

    Returns:
        An empty list also where the variables do not ask for DeepSpeed.
    """
    if not environ.flag_in(environment, "ACCELERATE_USE_DEEPSPEED"):
        return []
    if here and not probes.is_available("deepspeed"):
        return [NOT_INSTALLED]
    own = {name: text for name, text in environment.items() if name.startswith("ACCELERATE_")}
    try:
        with environ.patch_environment(**own):
            plugin = DeepSpeedPlugin()
            if mixed_precision != "no":
                plugin.set_mixed_precision(mixed_precision)
    except ValueError as error:
        return [str(error)]
    return []


def get_active_deepspeed_plugin(state: Any) -> Any:
    """Return the selected plugin.

    Args:
        state: an `AcceleratorState`.

    Raises:
        ValueError: DeepSpeed does not train.
    """
    if state.deepspeed_plugin is None:
        raise ValueError("there is no DeepSpeed plugin: give Accelerator a deepspeed_plugin")
    return state.deepspeed_plugin


def resolve_precision(plugins: Mapping[str, DeepSpeedPlugin], asked: str | None) -> str:
    """Return the precision of the run, and write it into the config of every plugin.

    It is the argument, else ACCELERATE_MIXED_PRECISION, else that of the first config that names one, else `no`.

    Args:
        plugins: of the accelerator, by name.
        asked: the argument `mixed_precision`, None where it was not given.

    Raises:
        ValueError: a config contradicts it.
    """
    wanted = asked
    if wanted is None:
        wanted = environ.get("ACCELERATE_MIXED_PRECISION") or "no"
        if wanted == "no":
            configured = (plugin.mixed_precision() for plugin in plugins.values())
            wanted = next((mode for mode in configured if mode is not None), wanted)
    wanted = str(wanted).lower()
    for plugin in plugins.values():
        plugin.set_mixed_precision(wanted)
    return wanted


def resolve_accumulation(
    plugins: Mapping[str, DeepSpeedPlugin], asked: GradientAccumulationPlugin
) -> GradientAccumulationPlugin:
    """Return how gradients accumulate, with the number of steps from DeepSpeed's config where that has one.

    Args:
        plugins: of the accelerator, by name.
        asked: what the accelerator was given; a `num_steps` of 1 or None leaves the number to the config.

    Raises:
        ValueError: both have a number, and they differ; or configs differ.
    """
    values = {name: plugin.get_value("gradient_accumulation_steps") for name, plugin in plugins.items()}
    own = {
        "config" if name == _ONLY else f"config {name!r}": value
        for name, value in values.items()
        if value not in (None, AUTO)
    }
    for config, value in own.items():
        if asked.num_steps not in (None, 1, value):
            raise ValueError(
                f"gradient_accumulation_steps {asked.num_steps} of the Accelerator != {value} of DeepSpeed's "
                f'{config}: leave one out, or let that be "auto"'
            )
    if len(set(own.values())) > 1:
        told = ", ".join(f"{value} of {config}" for config, value in own.items())
        raise ValueError(
            f"gradient_accumulation_steps differ: {told}. "
            'An Accelerator has one number for all plugins: give the same one, or let the others be "auto"'
        )
    return dataclasses.replace(asked, num_steps=next(iter(own.values()))) if own else asked
