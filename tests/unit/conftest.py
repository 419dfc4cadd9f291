"""Gives the unit tests the stand-ins that they share."""

from support.command_line import orchestra
from support.fake_slurm import fake_slurm

__all__ = ["fake_slurm", "orchestra"]
