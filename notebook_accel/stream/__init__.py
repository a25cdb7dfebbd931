"""The way from a worker to the notebook: sockets, frames, lines, the record of a run, and what shows it."""
