"""Attention over the paged cache: the contract, the backends, and the hook into transformers."""
