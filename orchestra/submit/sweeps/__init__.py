"""Sweeps: many runs as few Slurm arrays, recorded, submitted once, and gone on with. It trains nothing."""
