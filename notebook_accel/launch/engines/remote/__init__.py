"""Ranks on other machines: what holds their processes there and passes events on, for Ray, ssh and SLURM."""
