"""What can go wrong with the development cluster, each kind with the exit code of the command."""

from __future__ import annotations


class ClusterError(Exception):
    """Something on this machine failed; the message says what was found and what to do."""

    exit_code = 1


class UsageError(ClusterError):
    """The command was wrong, and nothing was started or stopped."""

    exit_code = 2
