"""From tensors to files, without holding up the training."""
