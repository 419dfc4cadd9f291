"""Checks whether a node can train: before an attempt, while it is idle, and after a hang."""
