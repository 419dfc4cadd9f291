"""The exceptions of this package. Callers translate them into their own.

LauncherError        a process cannot be started or ended, or a job not be submitted
├── SlurmMissing     this machine has no Slurm commands
├── SlurmRefused     Slurm said no, in its own words; nothing happened
└── SlurmSilent      nobody answered: what was asked for may or may not have happened
"""

from __future__ import annotations


class LauncherError(Exception):
    """Raised when something cannot be started or ended; the message says what was found and what to do."""


class SlurmMissing(LauncherError):  # noqa: N818  a fact about the machine
    """Raised when this machine does not have Slurm's commands."""


class SlurmRefused(LauncherError):  # noqa: N818  Slurm's decision
    """Raised when Slurm refused what it was asked for; the message has its words."""


class SlurmSilent(LauncherError):  # noqa: N818  no answer is no error of anybody's
    """Raised when Slurm did not answer. Nothing may be concluded from that."""
