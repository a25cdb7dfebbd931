"""How much memory a model needs, without allocating it: lists its tensors and adds them up."""
