"""Which plugins an accelerator has, and what they say of its other arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from .. import environ, probes
from ..handlers import GradientAccumulationPlugin
from .config import AUTO
from .library import NOT_INSTALLED
from .plugin import DeepSpeedPlugin

_ONLY: Final = "default"


def plugins(one: Any, several: Any, before: Any) -> dict[str, DeepSpeedPlugin] | None:
    """Return an accelerator's plugins by name, with one of them selected; None where DeepSpeed is not meant.

    Args:
        one: what was given as `deepspeed_plugin`.
        several: what was given as `deepspeed_plugins`.
        before: the plugins of an earlier accelerator.

    Raises:
        TypeError: it is neither a plugin nor a dict of them.
        ValueError: both were given, or others than before.
    """
    if one is not None and several is not None:
        raise ValueError("deepspeed_plugin and deepspeed_plugins are the same: leave one out")
    given = several if one is None else one
    if given is None and before is not None:
        return dict(before)
    if given is None and not environ.flag("ACCELERATE_USE_DEEPSPEED"):
        return None
    if given is None:
        given = DeepSpeedPlugin()
    found = dict(given) if isinstance(given, Mapping) else {_ONLY: given}
    wrong = [
        f"{name}: {plugin!r}" for name, plugin in found.items() if not isinstance(plugin, DeepSpeedPlugin)
    ]
    if wrong or not found:
        raise TypeError(
            f"deepspeed_plugin is a DeepSpeedPlugin or a dict of them, not {', '.join(wrong) or 'an empty dict'}"
        )
    if before is not None:
        if dict(before) != found:
            raise ValueError(
                "deepspeed_plugin comes too late: the first Accelerator has another. Give it all plugins as a dict, "
                "and choose by AcceleratorState().select_deepspeed_plugin(name)"
            )
        return dict(before)
    for plugin in found.values():
        plugin._unselect()
    return found


def wrong_in(environment: Mapping[str, str], mixed_precision: str, *, here: bool) -> list[str]:
    """Return what is wrong for processes with these variables; `here` where this machine's libraries are theirs."""
    if not environ.flag_in(environment, "ACCELERATE_USE_DEEPSPEED"):
        return []
    if here and not probes.is_available("deepspeed"):
        return [NOT_INSTALLED]
    own = {name: text for name, text in environment.items() if name.startswith("ACCELERATE_")}
    try:
        with environ.patch_environment(**own):
            plugin = DeepSpeedPlugin()
            if mixed_precision != "no":  # which is also what nobody asked for
                plugin.set_mixed_precision(mixed_precision)
    except ValueError as error:
        return [str(error)]
    return []


def selected(plugins: Mapping[str, DeepSpeedPlugin] | None) -> DeepSpeedPlugin | None:
    """Return the plugin that `prepare` uses, None where DeepSpeed does not train."""
    return next((plugin for plugin in (plugins or {}).values() if plugin.selected), None)


def named(plugins: Mapping[str, DeepSpeedPlugin] | None, name: str) -> DeepSpeedPlugin:
    """Return the plugin of this name; ValueError with the names there are for another."""
    if plugins is None:
        raise ValueError(f"there is no DeepSpeed plugin {name!r}: DeepSpeed is not in use")
    if name not in plugins:
        raise ValueError(f"there is no DeepSpeed plugin {name!r}, only {', '.join(map(repr, plugins))}")
    return plugins[name]


def select(plugins: Mapping[str, DeepSpeedPlugin] | None, name: str | None = None) -> None:
    """Let `prepare` use the plugin of this name, by default the first; ValueError as `named`."""
    found = named(plugins, next(iter(plugins or {}), "") if name is None else name)
    for plugin in (plugins or {}).values():
        plugin._unselect()
    found.select(_from_accelerator_state=True)


def get_active_deepspeed_plugin(state: Any) -> Any:
    """Return the selected plugin of an `AcceleratorState`; ValueError where DeepSpeed does not train."""
    if state.deepspeed_plugin is None:
        raise ValueError("there is no DeepSpeed plugin: give Accelerator a deepspeed_plugin")
    return state.deepspeed_plugin


def settle_precision(plugins: Mapping[str, DeepSpeedPlugin], asked: str | None) -> str:
    """Return the precision that the argument or the plugins say, and let all of these say it.

    Raises:
        ValueError: they contradict each other.
    """
    wanted = asked
    if wanted is None:
        said = environ.get("ACCELERATE_MIXED_PRECISION") or "no"
        own = [plugin.mixed_precision() for plugin in plugins.values()]
        wanted = next((found for found in own if found is not None), said) if said == "no" else said
    wanted = str(wanted).lower()
    for plugin in plugins.values():
        plugin.set_mixed_precision(wanted)
    return wanted


def settle_accumulation(
    plugins: Mapping[str, DeepSpeedPlugin], asked: GradientAccumulationPlugin
) -> GradientAccumulationPlugin:
    """Return the accumulation with the steps that the plugins say; ValueError where it says others."""
    for name, plugin in plugins.items():
        own = plugin.get_value("gradient_accumulation_steps")
        if own in (None, AUTO):
            continue
        if asked.num_steps not in (None, 1, own):
            raise ValueError(
                f"gradient_accumulation_steps {asked.num_steps} of the Accelerator != {own} of DeepSpeed's "
                f'{"config" if name == _ONLY else f"config {name!r}"}: leave one out, or let that be "auto"'
            )
        asked = dataclasses.replace(asked, num_steps=own)
    return asked
