"""What travels between the notebook and its workers, and how it is made ready."""
