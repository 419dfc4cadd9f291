"""What tells that bytes are the saved ones: checksums of chunks and files, digests of whole tensors."""
