"""The optimizer, its learning-rate schedule and gradient clipping, on one device."""
