"""From a function and its arguments to running workers and their outcome."""
