"""PluginSet: the DeepSpeed plugins of an accelerator, one of which is selected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .plugin import DeepSpeedPlugin


class PluginSet(Mapping[str, DeepSpeedPlugin]):
    """DeepSpeed plugins by name; `prepare` uses the selected one.

    Args:
        plugins: at least one.
    """

    def __init__(self, plugins: Mapping[str, DeepSpeedPlugin]) -> None:
        self._plugins = dict(plugins)

    def __getitem__(self, name: str) -> DeepSpeedPlugin:
        return self._plugins[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._plugins)

    def __len__(self) -> int:
        return len(self._plugins)

    @property
    def selected(self) -> DeepSpeedPlugin | None:
        """The plugin that `prepare` uses; None until the first accelerator is complete."""
        return next((plugin for plugin in self.values() if plugin.selected), None)

    def find(self, name: str) -> DeepSpeedPlugin:
        """Return the plugin of this name.

        Args:
            name: a key of the dict that the accelerator got; `default` for a single plugin.

        Raises:
            ValueError: there is none; the message lists the names.
        """
        if name not in self:
            raise ValueError(f"there is no DeepSpeed plugin {name!r}, only {', '.join(map(repr, self))}")
        return self[name]

    def select(self, name: str | None = None) -> None:
        """Let `prepare` use the plugin of this name from now on.

        Args:
            name: as in `find`; by default the first.

        Raises:
            ValueError: see `find`.
        """
        plugin = self.find(next(iter(self)) if name is None else name)
        for other in self.values():
            other._unselect()
        plugin.select(_from_accelerator_state=True)
