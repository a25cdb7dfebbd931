"""Collectives over the processes of a run."""
