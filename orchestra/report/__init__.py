"""What a run's own records say about it. Reads files only: it asks no scheduler and imports no torch."""
