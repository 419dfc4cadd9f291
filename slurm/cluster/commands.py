"""Runs the machine's commands (ip, mount, sinfo …) and turns their failures into messages."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

from slurm.cluster.errors import ClusterError
from slurm.cluster.services import PATH


def run(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    given: str = "",
    timeout_s: float = 60,
) -> str:
    """Run a command with a clean environment and return what it printed.

    Raises:
        ClusterError: it is not installed, ended with another code than 0, or took longer than `timeout_s`
        seconds.
    """
    try:
        done = subprocess.run(
            command,
            input=given,
            env={"PATH": PATH, "LC_ALL": "C", **(environment or {})},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError as error:
        raise ClusterError(f"{command[0]} is not installed here") from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"`{' '.join(command)}` gave no answer within {timeout_s:g} s") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip() or f"ended with {done.returncode} and no message"
        raise ClusterError(f"`{' '.join(command)}` failed: {said}")
    return done.stdout


def require_root(what: str) -> None:
    """Refuse to go on as an ordinary user.

    Raises:
        ClusterError: this process is not root.
    """
    if os.geteuid() != 0:
        raise ClusterError(
            f"{what} needs root: it makes network namespaces and starts Slurm's daemons; use sudo"
        )
