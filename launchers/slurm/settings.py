"""How a cluster is set up, and its name, in the words of `scontrol show config`. It judges nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from launchers.errors import LauncherError, SlurmRefused
from launchers.slurm.commands import output_of

# For the name, where the queue has answered already or the records speak without it.
_NAME_TIMEOUT_S = 8.0
# A name that nobody said is asked for again after so long.
_ASK_AGAIN_S = 60.0


def settings(timeout_s: float = 20.0) -> dict[str, str]:
    """Return the controller's settings by name. Raises SlurmMissing, SlurmRefused and SlurmSilent."""
    return parsed(output_of(("scontrol", "show", "config"), timeout_s=timeout_s))


def parsed(text: str) -> dict[str, str]:
    """Return the settings in what scontrol printed; lines that say something else are passed over."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {
        name.strip(): value.strip() for name, equals, value in pairs if equals and " " not in name.strip()
    }


def cluster_name(environment: Mapping[str, str]) -> str:
    """Return the cluster's name; inside a job Slurm has said it.

    Raises SlurmRefused where it has to be asked and nobody says it.
    """
    name = environment.get("SLURM_CLUSTER_NAME") or asked_cluster()
    if not name:
        raise SlurmRefused("scontrol show config names no cluster")
    return name


# By what decides which cluster is asked: the name, and when that was asked for.
_names: dict[tuple[str | None, ...], tuple[str | None, float]] = {}


def asked_cluster() -> str | None:
    """Return the name of the cluster that Slurm's commands ask from here; None where it is not to be had.

    It is asked for once; where nobody answered, again after a minute. What a job around this process says is
    passed over: the commands may be meant for another cluster.
    """
    where = tuple(os.environ.get(name) for name in ("SLURM_CONF", "SLURM_CLUSTERS", "PATH"))
    name, asked_at = _names.get(where, (None, -_ASK_AGAIN_S))
    if name is None and time.monotonic() - asked_at >= _ASK_AGAIN_S:
        try:
            name = settings(_NAME_TIMEOUT_S).get("ClusterName")
        except LauncherError:
            name = None
        _names[where] = (name, time.monotonic())
    return name
