"""The command `notebook-accel`."""
