"""How a causal language model is run: token trees, prefill, decode, caches. Plain PyTorch: the specification."""
