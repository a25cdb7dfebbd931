"""DeepSpeed's own configuration: its JSON with "auto" values, the plugin that says it in Python, and what fills it."""
