"""Pipeline parallelism: a rank's own stages, the links between stages, and the passes of a schedule."""
