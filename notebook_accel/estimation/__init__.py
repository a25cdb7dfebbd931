"""How much memory a model needs, without allocating it: where its tensors are listed, and what they add up to."""
