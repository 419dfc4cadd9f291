"""A run that trains on fewer nodes than it wants gets more of them, in jobs that help its own."""
