"""Weights: the registry, loading, the model hub, the value head, LoRA."""
