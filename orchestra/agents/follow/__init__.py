"""A run that begins when others are done (`orchestra submit --after`)."""
