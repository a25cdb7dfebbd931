"""Collectives: their contract, one class for each backend, and what is built on them for nested data."""
