"""The verbs that make and check token files."""
