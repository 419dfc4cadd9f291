"""`orchestra submit` on a real cluster of several hosts, as an ordinary user: submitted, trained, judged."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from sites import HELD, TINY, Site

pytestmark = pytest.mark.slow

SRUN_EXTRA = "cluster.srun_extra={cpu-bind: none, mpi: none, exact: true}"


def test_three_nodes_train_as_one_run(cluster: Site) -> None:
    run = cluster.submit_run("three", "cluster.nodes=3", "train.steps=5", SRUN_EXTRA)
    run.assert_job_ends("COMPLETED")
    assert run.steps() == [1, 2, 3, 4, 5]
    (start,) = run.events("attempt_started")
    assert (start["job"], start["nodes"], start["ranks_per_node"]) == (run.job, 3, 2)
    hosts = {event["host"] for event in run.events("finished") if "rank" in event}
    assert hosts == {start["host"], *(event["host"] for event in run.events("node_started"))}
    assert len(hosts) == 3, run.logs()
    for node in range(3):
        (log,) = run.dir.job_logs.glob(f"{run.job}_{node}_log.out")
        assert any(f"node {node} of 3 on {host}" in log.read_text() for host in hosts)
    logs = sorted(log.name for log in run.dir.attempt_logs(0).glob("rank-*"))
    assert logs == [f"rank-{rank:05d}.log" for rank in range(6)]
    assert {run.dir.path.owner(), run.dir.record.owner()} == {cluster.user.pw_name}
    state = run.status()
    assert (state["state"], state["step"], state["attempts"]) == ("finished", 5, 1)


def test_rank_that_is_killed_on_another_node_ends_all_nodes(cluster: Site) -> None:
    fault = "recovery.inject=[{at_step: 3, rank: 3}]"
    once = "recovery.max_restarts=0"
    run = cluster.submit_run("killed", "cluster.nodes=2", "train.steps=1000", fault, once)
    run.assert_job_ends("FAILED")
    (failure,) = run.events("rank_failed")
    assert (failure["rank"], failure["signal"]) == (3, "SIGKILL")
    assert failure["host"] != run.events("attempt_started")[0]["host"]
    assert f"rank 3 on {failure['host']} failed" in cluster.orchestra("why", "killed").stdout


def test_neither_a_later_edit_of_the_source_nor_the_callers_own_allocation_reaches_the_job(
    cluster: Site,
) -> None:
    outer = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "9", "SBATCH_PARTITION": "nowhere", "PMIX_RANK": "4"}
    tree = cluster.copy_of_the_code("edited")
    changed = tree / "orchestra" / "train" / "__main__.py"
    changed.write_text(changed.read_text().replace("def main()", "UNCOMMITTED = True\n\n\ndef main()"))
    own = ("train.steps=2", 'cluster.setup=["env > inside"]', HELD)
    run = cluster.submit_run("frozen", *own, root=tree, **outer)
    assert cluster.job_state(run.job) == "PENDING"
    assert run.status()["state"] == "queued"
    for file in tree.rglob("*.py"):
        file.write_text("raise SystemExit('edited after it was submitted')\n")
    cluster.run("scontrol", "release", run.job)
    run.assert_job_ends("COMPLETED")
    assert "UNCOMMITTED" in (run.dir.code / "orchestra" / "train" / "__main__.py").read_text()
    inside = (run.dir.path / "inside").read_text()
    assert f"SLURM_JOB_ID={run.job}\n" in inside
    assert "PMIX_RANK" not in inside


def test_a_set_up_line_that_fails_ends_the_job_and_is_named(cluster: Site) -> None:
    """A function as `module` is, with a command inside that fails; the second one fails itself."""
    load = "load() { ls /nowhere; [ $1 = cuda ]; }"
    setup = f"cluster.setup=['{load}','load cuda','load nosuch']"
    run = cluster.submit_run("unset", "train.steps=2", setup)
    run.assert_job_ends("FAILED", "93:0")
    words = "line 3 of cluster.setup `load nosuch` failed with exit code 1"
    assert f"unset: failed: {words}" in cluster.orchestra("why", "unset").stdout
    assert run.status()["code"] == 93
    cluster.orchestra("resume", "unset", "cluster.setup_may_fail=true")
    run.wait_for_step(2)


def test_lost_answer_of_sbatch_submits_no_second_job(cluster: Site) -> None:
    run = cluster.submit_run("lost", "train.steps=1", HELD, **cluster.lost_answer_of_sbatch())
    assert cluster.queue("--name=lost", "--format=%i") == [run.job]
    assert json.loads(run.dir.record.read_text())["jobs"][0]["id"] == run.job


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["cluster.partition=mian"], "no such partition; did you mean main?"),
        (["cluster.device=cuda", "cluster.gpus_per_node=5"], "have 4 GPUs each"),
        (["run.dir=/dev/shm/runs"], "lies in this machine's memory"),
        (["cluster.slurm_extra.reservation=nowhere"], "Slurm refuses the job"),
    ],
)
def test_wrong_wishes_end_with_2_before_anything_exists(
    cluster: Site, overrides: Sequence[str], words: str
) -> None:
    cluster.refused(2, words, "submit", *TINY, "run.name=refused", *overrides)
    assert not (cluster.runs / "refused").exists()
    assert not cluster.queue("--name=refused")
