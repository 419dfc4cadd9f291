"""The checkpoints of one place: which there are, which may go, and whether they are what they were."""
