"""A run that was submitted for several kinds of nodes: which of its jobs trains it."""
