"""DeepSpeed: its config and plugin, and the strategy that trains by it."""
