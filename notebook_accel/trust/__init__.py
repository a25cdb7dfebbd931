"""Who may talk to a run: the secret of its nodes, the proof of a connection, and messages that are data only."""
