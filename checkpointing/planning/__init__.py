"""Who writes and who reads what. Pure: the same input gives every rank the same plan."""
