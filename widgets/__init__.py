"""Widgets for the notebook."""
