"""Nodes of a real cluster: `orchestra doctor` and `orchestra bench network` try them, those that failed are
left out of later jobs.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections.abc import Iterator

import pytest
from sites import TINY, Site

from orchestra.recovery.excluded_hosts import ExcludeList, Listed, excluded_folder

pytestmark = pytest.mark.slow


@pytest.fixture
def listed(cluster: Site) -> Iterator[str]:
    """Put the first node on the cluster's list, which is empty before and after."""
    # Else it would be root's.
    cluster.run("mkdir", "-p", str(cluster.runs))
    host = cluster.run("sinfo", "--noheader", "--Node", "--format=%N").stdout.split()[0]
    now = time.time()
    name = cluster.run("scontrol", "show", "config").stdout.partition("ClusterName")[2].split()[1]
    entry = Listed(host, f"{host} failed twice", "runs/before", (1, 2), ("hang", "hang"), now, now + 3600)
    ExcludeList(cluster.runs, name).add(entry)
    yield host
    shutil.rmtree(excluded_folder(cluster.runs), ignore_errors=True)


def test_a_listed_node_gets_no_part_in_a_run_that_a_warning_to_all_its_processes_stops(
    cluster: Site, listed: str
) -> None:
    """All its nodes stop after one step, with a checkpoint."""
    shown = cluster.orchestra("submit", *TINY, "cluster.nodes=2", "run.name=avoiding", "--dry-run")
    assert f"#SBATCH --exclude={listed}\n" in shown.stdout
    assert f"without {listed}: {listed} failed twice" in shown.stderr
    assert "expects to start it at" in shown.stderr
    # Nobody's mail is to say that it failed.
    once = ("cluster.requeue=never", "cluster.stop_exit_code=0")
    run = cluster.submit_run("warned", "cluster.nodes=2", "train.steps=100000", *once)
    run.wait_for_step(3)
    assert listed not in run.hosts(0)
    cluster.run("scancel", "--signal=USR2", run.job)
    run.assert_job_ends("COMPLETED", "0:0")
    stopped = {event["step"] for event in run.events("failed") if "rank" in event}
    assert len(stopped) == 1
    state = run.status()
    assert (state["state"], state["code"], state["checkpoint_step"]) == ("stopped", 75, *stopped)
    findings = cluster.orchestra("doctor", check=False).stdout
    assert f"{listed} of cluster" in findings
    assert "rm " in findings


def test_doctor_finds_two_nodes_well_and_leaves_no_job(cluster: Site) -> None:
    outer = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "9"}
    done = cluster.orchestra("doctor", "--nodes", "2", "--json", check=False, **outer)
    record = json.loads(done.stdout)
    findings = {finding["name"]: finding for finding in record["findings"]}
    assert (done.returncode, record["ok"]) == (0, True), done.stdout
    assert findings["nodes"]["found"].startswith("2 answered: node")
    of_nodes = ("network", "orchestra", "python", "clocks")
    names = ("slurm", "shared run.dir", *(f"nodes' {name}" for name in of_nodes))
    assert {findings[name]["mark"] for name in names} == {"ok"}
    more = json.loads(cluster.orchestra("doctor", "--nodes", "99", "--json", check=False).stdout)
    (refused,) = [finding["found"] for finding in more["findings"] if finding["name"] == "nodes"]
    assert re.fullmatch(r"the default partition has \d nodes, 99 were asked for", refused)
    assert not cluster.queue()
    assert not list(cluster.shared.glob(".orchestra-doctor-*"))


def test_network_inside_and_between_two_nodes_is_measured_and_kept(cluster: Site) -> None:
    overrides = ("cluster=slurm", "cluster.device=cpu", "cluster.gpus_per_node=2", "cluster.nodes=2")
    record = json.loads(cluster.orchestra("bench", "network", *overrides, "--json").stdout)
    assert (len(record["hosts"]), record["ranks_per_node"], record["interface"]) == (2, 2, "eth0")
    file = cluster.shared / ".local" / "share" / "orchestra" / "network" / "devcluster.json"
    kept = json.loads(file.read_text())["measured"]["cpu"]
    kinds = ("bytes_per_s", "latency_s")
    for name in (f"{place}_node_{kind}" for place in ("intra", "inter") for kind in kinds):
        assert 0 < kept[name] < math.inf
        assert kept[name] == record["network"][name]
    assert not list(cluster.runs.glob(".orchestra-network*"))
