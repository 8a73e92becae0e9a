"""Runs a causal language model: token trees, prefill, decode, caches. Plain PyTorch; `cpu` makes it faster."""
