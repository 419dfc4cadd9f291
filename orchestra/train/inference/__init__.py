"""Forward passes without gradients: held-out losses, and samples from a checkpoint."""
