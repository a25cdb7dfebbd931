"""Runs that outlive their notebook: what they leave for others is files, which anybody of the same user reads."""
