"""Gives the Slurm tests one cluster that they share, and an ordinary user on it who submits their jobs."""

from __future__ import annotations

import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from matrix_injections import LENGTH
from matrix_oracle import References
from passage import let_through
from sites import ROOT, Site

from slurm.cluster.layout import Settings
from slurm.cluster.operations import up

USER = "orchestra-test"


@pytest.fixture(scope="session")
def submitter() -> Iterator[pwd.struct_passwd]:
    """Return an ordinary user who can run this Python and read this repository; one made here is removed."""
    try:
        user = pwd.getpwnam(USER)
        was_made = False
    except KeyError:
        subprocess.run(["useradd", "--no-create-home", "--user-group", USER], check=True)
        user = pwd.getpwnam(USER)
        was_made = True
    python = Path(sys.executable)
    needed = [python, python.resolve(), Path(sys.prefix), Path(sys.base_prefix), ROOT]
    with let_through(user.pw_uid, needed):
        yield user
    if was_made:
        subprocess.run(["userdel", USER], check=True, capture_output=True)


@pytest.fixture(scope="session")
def new_site(submitter: pwd.struct_passwd) -> Iterator[Callable[..., Site]]:
    """Return a function that starts a cluster with options of `up`; all end with the session."""
    sites: list[Site] = []

    def start(*options: str) -> Site:
        # Not pytest's own folder: that one is closed to other users, and too long for sockets.
        site = Site(Path(tempfile.mkdtemp(prefix="orchestra-slurm-")), submitter)
        sites.append(site)
        site.devcluster("up", *options)
        return site

    yield start
    for site in sites:
        site.devcluster("down")
        shutil.rmtree(site.folder)


@pytest.fixture(scope="session")
def shared_cluster(new_site: Callable[..., Site]) -> Site:
    """Return the cluster of four nodes with accounting that all tests share."""
    return new_site("--nodes", "4", "--gpus", "4")


@pytest.fixture(scope="session")
def references(shared_cluster: Site) -> References:
    """Return the uninterrupted runs that those with faults are compared with."""
    return References(shared_cluster, LENGTH, "matrix")


@pytest.fixture(scope="session")
def site_without_accounting(new_site: Callable[..., Site]) -> Site:
    """Return a cluster of three nodes as small sites have it: no slurmdbd, so no sacct."""
    return new_site("--nodes", "3", "--gpus", "4", "--no-accounting")


@pytest.fixture
def cluster(shared_cluster: Site) -> Iterator[Site]:
    """Return the shared cluster, with all nodes up and no jobs; a test's jobs end with it."""
    # In this process: a start of Python for each test is half a minute of all.
    up(shared_cluster.state, Settings(nodes=4, gpus=4))
    yield shared_cluster
    shared_cluster.cancel_all_jobs()
