"""Rehearsals: a short copy of a run with planned faults, compared with an undisturbed one."""
