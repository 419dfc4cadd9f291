"""From files to tensors, on any layout."""
