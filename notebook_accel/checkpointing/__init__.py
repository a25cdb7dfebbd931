"""Checkpoints: files that survive a crash at any instant, and what they hold."""
