"""ZeRO: parameters, gradients and optimizer state in flat buffers that the ranks of a group share out."""
