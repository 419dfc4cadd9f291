"""The planner against what was measured: published runs of other trainers, and runs on this machine's CPU."""
