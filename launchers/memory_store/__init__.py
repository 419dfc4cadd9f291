"""Copies of the ranks' state in the memory of nodes: kept, exchanged and fetched back."""
