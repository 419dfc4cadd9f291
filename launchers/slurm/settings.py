"""How a cluster is set up, in the words of `scontrol show config`. It asks once and judges nothing."""

from __future__ import annotations

from collections.abc import Mapping

from launchers.errors import SlurmRefused
from launchers.slurm.commands import output_of


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

    Raises SlurmMissing, SlurmRefused and SlurmSilent where it has to be asked.
    """
    name = environment.get("SLURM_CLUSTER_NAME") or settings().get("ClusterName")
    if not name:
        raise SlurmRefused("scontrol show config names no cluster")
    return name
