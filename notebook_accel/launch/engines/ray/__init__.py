"""Ranks on a Ray cluster: `engine`, `cluster` and `ray_group` in the notebook, `actor` and `process` on the nodes."""
