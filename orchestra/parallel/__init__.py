"""Parallelism, applied to a single-device model from outside. It knows no training loop."""
