"""From tensors to files and the manifest: the memory for them, the save, and what it outdates."""
