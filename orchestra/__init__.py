"""orchestra: launches, trains and keeps alive language-model pretraining runs on SLURM clusters."""

__version__ = "0.1.0"
