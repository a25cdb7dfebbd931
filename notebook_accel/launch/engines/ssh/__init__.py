"""Ranks on hosts that the user's own ssh reaches."""
