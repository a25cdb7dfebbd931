"""The way from a worker to the notebook: sockets, frames, lines, the record and what shows it."""
