"""What a configuration asks of a cluster against what it has."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from support.fake_slurm import FakeSlurm

from conf.schema import ClusterConfig, Config, Device, LauncherName
from launchers.slurm.cluster import NodeKind, Partition
from orchestra.config.compose import compose
from orchestra.config.machine import Situation
from orchestra.errors import ConfigError
from orchestra.submit.site import (
    Site,
    cpus_of_share,
    file_system_of,
    folder_problems,
    gpu_type,
    has_whole_nodes,
    site_problems,
)
from orchestra.submit.submission import members_on_one

GPU_NODES = NodeKind(num_nodes=3, num_cpus=64, num_gpus=4, state="idle")
BIG_NODE = NodeKind(num_nodes=1, num_cpus=96, num_gpus=8, state="mixed")
MAIN = Partition("main", True, True, "1-00:00:00", (GPU_NODES, BIG_NODE))
CPU = Partition("cpu", False, True, "infinite", (NodeKind(10, 128, 0, "idle"),))
SITE = (MAIN, CPU)
MOUNTS = """\
22 1 0:20 / / rw - ext4 /dev/sda rw
23 22 0:21 / /dev/shm rw,nosuid shared:2 - tmpfs tmpfs rw
24 22 0:22 / /home\\040dirs rw - nfs4 server:/home rw
"""


def asked(**cluster: Any) -> Config:
    base = ClusterConfig(launcher=LauncherName.slurm, device=Device.cuda, gpus_per_node=4)
    return dataclasses.replace(Config(), cluster=dataclasses.replace(base, **cluster))


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"nodes": 4}, None),
        ({"nodes": 1, "gpus_per_node": 8}, None),
        ({"partition": "cpu", "device": Device.cpu, "nodes": 10}, None),
        ({"partition": "main,cpu", "nodes": 4}, None),
        ({"partition": "man"}, "did you mean main? There are main*, cpu"),
        ({"partition": "main,old"}, "no such partition"),
        ({"nodes": 5}, "partition main has 4 nodes; use at most that"),
        ({"nodes": 2, "gpus_per_node": 8}, "only 1 node of partition main have as many GPUs"),
        ({"gpus_per_node": 9}, "have 8 GPUs each"),
        ({"gpus_per_node": 4, "members_per_node": 2}, None),
        ({"gpus_per_node": 4, "members_per_node": 3}, "3 members × 4 GPUs, but the nodes of partition main"),
        ({"gpus_per_node": 1, "members_per_node": 16}, None),
        ({"partition": "cpu"}, "no node of partition cpu has GPUs; use cluster.device=cpu"),
        ({"time_limit": "2-00:00:00"}, "is above the limit of main 1-00:00:00"),
        ({"time_limit": "UNLIMITED", "partition": "cpu", "device": Device.cpu}, None),
        ({"time_limit": "UNLIMITED"}, "cluster.time_limit=UNLIMITED is above the limit of main 1-00:00:00"),
        ({"time_limit": "2-00", "partition": "main,cpu"}, None),
    ],
)
def test_what_the_cluster_cannot_give_is_one_sentence(wishes: dict[str, Any], words: str | None) -> None:
    problems = list(site_problems(asked(**wishes), SITE))
    assert len(problems) == (0 if words is None else 1), problems
    assert words is None or words in problems[0]


def test_a_job_that_waits_for_nodes_that_are_out_of_service_is_submitted(
    fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = "allocation failure: Requested node configuration is not available"
    fake_slurm.says("sbatch", complains=refusal, code=1)
    fake_slurm.says("sinfo", prints="node1|main*|idle\nnode4|main*|drained")
    script = "#!/bin/bash\n#SBATCH --partition=main\n"
    assert Site(SITE).tested(script) is None
    assert "out of service are node4; the job waits" in capsys.readouterr().err
    assert "--partition=main" in fake_slurm.calls("sinfo")[-1]
    fake_slurm.says("sinfo", prints="node1|main*|idle\nnode4|main*|mixed")
    with pytest.raises(ConfigError, match="is not available"):
        Site(SITE).tested(script)


def test_a_qos_may_lift_the_partitions_time_limit(fake_slurm: FakeSlurm) -> None:
    wishes = asked(time_limit="2-00", qos="long")
    for flags, is_fine in (("DenyOnLimit,PartitionTimeLimit", True), ("DenyOnLimit", False), ("", False)):
        fake_slurm.put("sacctmgr", f"echo {flags}")
        assert (list(site_problems(wishes, SITE)) == []) is is_fine, flags
    fake_slurm.put("sacctmgr", "echo 'sacctmgr: error: Socket timed out' >&2; exit 1")
    assert list(site_problems(wishes, SITE)) == []


@pytest.mark.parametrize(
    ("partition", "words"),
    [(CPU, "no default one; there are cpu"), (dataclasses.replace(MAIN, is_up=False), "takes no jobs now")],
    ids=["no default", "closed"],
)
def test_a_partition_must_be_chosen_and_open(partition: Partition, words: str) -> None:
    (problem,) = site_problems(asked(), (partition,))
    assert words in problem


@pytest.mark.parametrize(
    ("wishes", "numbers"),
    [
        ({}, {}),
        ({"device": Device.auto, "gpus_per_node": "auto"}, {"device": Device.cuda, "gpus_per_node": 8}),
        ({"device": Device.cpu, "gpus_per_node": "auto"}, {"gpus_per_node": 2}),
        (
            {"device": Device.auto, "gpus_per_node": "auto", "partition": "cpu"},
            {"device": Device.cpu, "gpus_per_node": 2},
        ),
    ],
)
def test_auto_becomes_what_the_partition_has(wishes: dict[str, Any], numbers: dict[str, Any]) -> None:
    assert Site(SITE).numbered(asked(**wishes)) == asked(**{**wishes, **numbers})


def test_cores_go_with_the_gpus() -> None:
    assert cpus_of_share(asked(gpus_per_node=2), SITE) == 24
    assert cpus_of_share(asked(gpus_per_node=8), SITE) == 96
    assert cpus_of_share(asked(partition="cpu"), SITE) is None


def test_whole_nodes_are_those_of_which_no_gpu_is_left() -> None:
    assert has_whole_nodes(asked(gpus_per_node=8), SITE)
    assert not has_whole_nodes(asked(gpus_per_node=4), SITE), "the big node would keep 4"
    assert has_whole_nodes(asked(gpus_per_node=4), (dataclasses.replace(MAIN, kinds=(GPU_NODES,)),))
    assert not has_whole_nodes(asked(gpus_per_node=2), SITE)
    assert not has_whole_nodes(asked(partition="cpu"), SITE)


def test_members_that_share_a_node_have_its_gpus_and_cores_together() -> None:
    wishes = [asked(gpus_per_node=1, members_per_node=each) for each in (1, 2, 8, 20)]
    shares = [Site(SITE).share_of_nodes(wish) for wish in wishes]
    assert [(share.gpus, share.cpus) for share in shares] == [(None, 12), (2, 24), (8, 96), (8, 96)]
    assert [share.has_whole_nodes for share in shares] == [False, False, True, True]
    assert [members_on_one(*pair) for pair in zip(wishes, shares, strict=True)] == [1, 1, 1, 3]


def test_folders_in_memory_are_not_shared() -> None:
    assert file_system_of(Path("/dev/shm/runs/x"), MOUNTS) == "tmpfs"
    assert file_system_of(Path("/home dirs/me"), MOUNTS) == "nfs4"
    assert list(folder_problems(Path("/home dirs/me"), MOUNTS)) == []
    (problem,) = folder_problems(Path("/dev/shm/runs"), MOUNTS)
    assert "tmpfs" in problem


def test_the_type_of_gpus_is_known_where_all_nodes_that_could_serve_have_it() -> None:
    h100, a100 = frozenset({"h100"}), frozenset({"a100"})
    small = dataclasses.replace(GPU_NODES, gpu_types=a100)
    large = dataclasses.replace(BIG_NODE, gpu_types=h100)
    mixed = (dataclasses.replace(MAIN, kinds=(small, large)),)
    assert gpu_type(asked(gpus_per_node=8), mixed) == "h100"
    assert gpu_type(asked(gpus_per_node=4), mixed) is None
    assert gpu_type(asked(gpus_per_node="auto"), mixed) is None
    assert gpu_type(asked(), SITE) is None


def test_what_the_cluster_lacks_is_said_together_with_what_the_rules_refuse() -> None:
    overrides = ["cluster=slurm", "cluster.nodes=9", "train.steps=0", "model=debug"]
    with pytest.raises(ConfigError) as refusal:
        compose(overrides, Situation("submit", cluster=Site(SITE)))
    said = "\n".join(refusal.value.problems)
    assert "partition main has 4 nodes" in said
    assert "train.steps=0" in said
    numbered = compose([*overrides[:1], "cluster.nodes=1"], Situation("submit", cluster=Site(SITE))).config
    assert (numbered.cluster.device, numbered.cluster.gpus_per_node) == (Device.cuda, 8)
    assert numbered.train.global_batch_size is not None, "it follows from the cluster's numbers"
