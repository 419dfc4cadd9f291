"""What a checkpoint is made of: boxes of tensors, their bytes in files, checksums, and the manifest. Pure."""
