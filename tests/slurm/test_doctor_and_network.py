"""`orchestra doctor` and `orchestra bench network` on a real cluster, as an ordinary user."""

from __future__ import annotations

import json
import math
import sys

import pytest
from sites import ROOT, Site

pytestmark = pytest.mark.slow

FIGURES = (
    "intra_node_bytes_per_s",
    "inter_node_bytes_per_s",
    "intra_node_latency_s",
    "inter_node_latency_s",
)


def test_doctor_finds_two_nodes_well_and_leaves_no_job(cluster: Site) -> None:
    words = (sys.executable, "-m", "orchestra", "doctor", "--nodes", "2", "--json")
    done = cluster.run(*words, check=False, PYTHONPATH=str(ROOT), SLURM_JOB_ID="77", SLURM_NTASKS="9")
    record = json.loads(done.stdout)
    found = {finding["name"]: finding for finding in record["findings"]}
    assert (done.returncode, record["ok"]) == (0, True), done.stdout
    assert found["nodes"]["found"].startswith("2 answered: node")
    names = (
        "slurm",
        "shared run.dir",
        "nodes' network",
        "nodes' orchestra",
        "nodes' python",
        "nodes' clocks",
    )
    assert {found[name]["mark"] for name in names} == {"ok"}
    assert not cluster.run("squeue", "--noheader").stdout.strip()
    assert not list(cluster.shared.glob(".orchestra-doctor-*"))


def test_network_inside_and_between_two_nodes_is_measured_and_kept(cluster: Site) -> None:
    overrides = ("cluster=slurm", "cluster.device=cpu", "cluster.gpus_per_node=2", "cluster.nodes=2")
    words = (sys.executable, "-m", "orchestra", "bench", "network", *overrides, "--json")
    done = cluster.run(*words, check=False, timeout_s=110, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert (len(record["hosts"]), record["ranks_per_node"], record["interface"]) == (2, 2, "eth0")
    file = cluster.shared / ".local" / "share" / "orchestra" / "network" / "devcluster.json"
    kept = json.loads(file.read_text())["measured"]["cpu"]
    for name in FIGURES:
        assert 0 < kept[name] < math.inf
        assert kept[name] == record["network"][name]
    assert not list((cluster.shared / "runs").glob(".*"))
