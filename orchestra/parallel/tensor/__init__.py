"""Tensor and sequence parallelism: layers cut over a group of ranks, from outside of the model."""
