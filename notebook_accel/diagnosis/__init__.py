"""What a bug report should say about this machine, and what hinders launches on it; no device is initialised."""
