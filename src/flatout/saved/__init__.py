"""Alternatives to storing tensors for the backward pass: derive, recompute or offload them."""
