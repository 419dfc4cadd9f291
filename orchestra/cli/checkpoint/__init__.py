"""The verbs that look at, check and move the checkpoints of a run."""
