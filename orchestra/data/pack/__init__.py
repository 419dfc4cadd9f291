"""`orchestra data pack`: from text files to token files."""
