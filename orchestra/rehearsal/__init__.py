"""Rehearsals: a short copy of a run that faults befall on purpose, beside one that nothing happens to."""
