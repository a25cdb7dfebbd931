"""Ranks in an allocation of SLURM: the one that the notebook runs in, or that of a job which is submitted for them."""
