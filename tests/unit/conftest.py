"""Gives the unit tests the stand-ins that they share."""

from support.fake_slurm import fake_slurm

__all__ = ["fake_slurm"]
