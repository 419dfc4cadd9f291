"""Nodes that failed before are left out of jobs, and all nodes look at themselves and each other first."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sites import Site
from test_submit import TINY, ended, named, orchestra, said, submitted

from orchestra.recovery.excluded_hosts import ExcludeList, Listed, excluded_folder

pytestmark = pytest.mark.slow


@pytest.fixture
def runs(cluster: Site) -> Iterator[Path]:
    """The folder of the runs, whose list is empty before and after."""
    folder = cluster.shared / "runs"
    yield folder
    shutil.rmtree(excluded_folder(folder), ignore_errors=True)


def put_on_list(cluster: Site, runs: Path, host: str) -> None:
    now = time.time()
    name = cluster.run("scontrol", "show", "config").stdout.partition("ClusterName")[2].split()[1]
    entry = Listed(host, f"{host} failed twice", "runs/before", (1, 2), ("hang", "hang"), now, now + 3600)
    ExcludeList(runs, name).add(entry)


def test_a_listed_node_gets_no_part_in_a_job_until_its_file_is_removed(cluster: Site, runs: Path) -> None:
    first = cluster.run("sinfo", "--noheader", "--Node", "--format=%N").stdout.split()[0]
    put_on_list(cluster, runs, first)
    shown = orchestra(cluster, "submit", *TINY, "cluster.nodes=2", "run.name=avoiding", "--dry-run")
    assert f"#SBATCH --exclude={first}\n" in shown.stdout
    assert f"without {first}: {first} failed twice" in shown.stderr
    run, job = submitted(cluster, "avoiding", "cluster.nodes=2", "train.steps=3")
    assert ended(cluster, job) == "COMPLETED", said(run)
    (start,) = named(run, "attempt_started")
    assert first not in start["hosts"]
    told = orchestra(cluster, "doctor", check=False).stdout
    assert f"{first} of cluster" in told
    assert "rm " in told


def test_all_nodes_look_at_themselves_and_none_is_found_wanting(cluster: Site) -> None:
    nodes = ("cluster.nodes=3", "cluster.spare_nodes=1")
    run, job = submitted(cluster, "looked-at", *nodes, "train.steps=3")
    assert ended(cluster, job) == "COMPLETED", said(run)
    (checked,) = named(run, "node_checked")
    assert (checked["nodes"], checked["looked"]) == (4, 4), said(run)
    assert not {"unfit", "doubt", "left_out", "clock_off_s"} & set(checked), checked
    assert named(run, "node_slow") == []
