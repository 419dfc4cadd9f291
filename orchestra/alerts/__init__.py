"""Says when something is wrong with a run: detectors over its records, what was said already, and to whom."""
