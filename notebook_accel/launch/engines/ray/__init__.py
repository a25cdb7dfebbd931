"""Ranks on a Ray cluster: `engine`, `cluster` and `crew` in the notebook, `actor` and `child` on the nodes."""
