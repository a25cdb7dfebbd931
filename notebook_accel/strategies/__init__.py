"""Strategies: how models and optimizers are made ready to train over the processes of a run."""
