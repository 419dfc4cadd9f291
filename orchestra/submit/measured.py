"""Which cluster a configuration means, and so which measured network. It measures nothing."""

from __future__ import annotations

import dataclasses
import functools
import os
import socket
from pathlib import Path

from conf.schema import Config, LauncherName
from launchers.errors import LauncherError
from launchers.slurm.settings import cluster_name
from orchestra.network import measured_file, read_measured, with_measured


def file_of(config: Config) -> Path:
    """Return where the network of the configuration's cluster is kept: Slurm's name of it, or this host's.

    Where Slurm does not say its name, the cluster's in the configuration.
    """
    if config.cluster.launcher is not LauncherName.slurm:
        return measured_file(os.environ, socket.gethostname())
    return measured_file(os.environ, _slurms_name() or config.cluster.name)


@functools.cache
def _slurms_name() -> str | None:
    """Ask Slurm once for its name of the cluster, however many runs are made ready."""
    try:
        return cluster_name(os.environ)
    except LauncherError:
        return None


def with_measured_network(config: Config) -> Config:
    """Return the configuration with what was measured in the place of the nulls of cluster.network."""
    measured = read_measured(file_of(config), config.cluster.device.value)
    network = with_measured(config.cluster.network, measured)
    return dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, network=network))
