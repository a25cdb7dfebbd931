"""The agent of a machine: one fresh process that starts workers, by a fork of itself or as a fresh Python."""
