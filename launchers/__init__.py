"""Gets processes onto nodes, watches them and ends them; without torch, Hydra or orchestra.

    LaunchSpec ──► torchrun.command (pure) ──► NodeAgent (one per node) ──► Ending ──► the caller's verdict

torchrun           what is started where; torchrun's command line and what it reports
bound_torchrun     torchrun itself, its store at one address; a program, and the only one with torch
channel            connections between nodes whose both ends know the job's secret
node_agent         starts torchrun on one node, watches it, ends what is left of it
node_group         how the agents of a job know each other, agree, and notice who is gone
fork_server/       optional: torchrun and ranks forked from a process that has imported torch
memory_store/      optional: copies of the ranks' state in the memory of nodes
slurm/             what is asked of Slurm and told to it
processes, host_network   /proc; addresses and free ports

Linux only: processes are found through /proc and tied to their parents by PR_SET_PDEATHSIG.

Its exceptions, which callers translate into their own:

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
