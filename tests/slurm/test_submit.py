"""`orchestra submit` on a real cluster of several hosts, as an ordinary user: submitted, trained, judged."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from sites import ROOT, Site, wait_until

from orchestra.run.events import read_events
from orchestra.run.files import Record
from orchestra.run.metrics_file import read_metrics
from orchestra.run.paths import RunDir

pytestmark = pytest.mark.slow

# A model of 11,056 parameters: what takes time is starting the ranks.
TINY = (
    "model.hidden_size=16",
    "model.intermediate_size=32",
    "model.num_hidden_layers=1",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=1",
    "train.seq_len=16",
    "wandb.mode=disabled",
    "cluster.device=cpu",
    "cluster.gpus_per_node=2",
    "cluster.threads_per_rank=1",
    "cluster.peak_tflops=1",
)

# For a run that trains until a test ends it: it leaves the processors to others. About ten steps a second.
PACE = "recovery.inject=[{at_step: 1, rank: all, fault: slow, seconds: 0.08, attempt: all}]"


def orchestra(
    cluster: Site, *arguments: str, root: Path = ROOT, check: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command as the ordinary user on the login node, from the tree at `root`."""
    words = (sys.executable, "-m", "orchestra", *arguments)
    return cluster.run(*words, check=check, PYTHONPATH=str(root), **environment)


def submitted(
    cluster: Site, name: str, *overrides: str, root: Path = ROOT, **environment: str
) -> tuple[RunDir, str]:
    """Submit a small run and return it with its job."""
    words = ("submit", *TINY, f"run.name={name}", *overrides, "--json")
    facts = json.loads(orchestra(cluster, *words, root=root, **environment).stdout)
    return RunDir(Path(facts["path"])), facts["job"]


def ended(cluster: Site, job: str) -> str:
    """Wait for a job's end and return Slurm's word for it."""
    over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
    wait_until(lambda: cluster.job_state(job) in over, f"job {job} ends", within_s=100)
    return cluster.job_state(job)


def exit_code(cluster: Site, job: str) -> str:
    shown = cluster.run("scontrol", "--oneliner", "show", "job", job).stdout
    return dict(field.split("=", 1) for field in shown.split() if "=" in field)["ExitCode"]


def state_of(cluster: Site, name: str) -> Record:
    (state,) = json.loads(orchestra(cluster, "status", name, "--json").stdout)
    return dict(state)


def named(run: RunDir, event: str) -> list[Record]:
    return [record for record in read_events(run) if record["event"] == event]


def said(run: RunDir) -> str:
    """Return everything that the run's logs hold, for a failing test."""
    return "\n".join(f"==> {file} <==\n{file.read_text()}" for file in sorted(run.logs.rglob("*.log*")))


def test_three_nodes_train_as_one_run(cluster: Site) -> None:
    run, job = submitted(cluster, "three", "cluster.nodes=3", "train.steps=5")
    assert ended(cluster, job) == "COMPLETED", said(run)
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3, 4, 5]
    (start,) = named(run, "attempt_started")
    assert (start["job"], start["nodes"], start["ranks_per_node"]) == (job, 3, 2)
    hosts = {record["host"] for record in named(run, "finished") if "rank" in record}
    assert hosts == {start["host"], *(record["host"] for record in named(run, "node_started"))}
    assert len(hosts) == 3, said(run)
    for node in range(3):
        (log,) = run.job_logs.glob(f"{job}_{node}_log.out")
        assert any(f"node {node} of 3 on {host}" in log.read_text() for host in hosts)
    assert sorted(log.name for log in run.attempt_logs(0).glob("rank-*")) == [
        f"rank-{rank:05d}.log" for rank in range(6)
    ]
    assert (run.path.owner(), run.record.owner()) == (cluster.user.pw_name, cluster.user.pw_name)
    state = state_of(cluster, "three")
    assert (state["state"], state["step"], state["attempts"]) == ("finished", 5, 1)


def test_failing_run_is_failed_in_slurm_with_its_exit_code(cluster: Site) -> None:
    overrides = ("cluster.nodes=2", "train.steps=20", "train.on_nonfinite=stop", "optim.lr=1e30")
    run, job = submitted(cluster, "diverging", *overrides, "optim.clip_norm=null", "optim.warmup_steps=0")
    assert ended(cluster, job) == "FAILED", said(run)
    assert exit_code(cluster, job) == "93:0", said(run)
    state = state_of(cluster, "diverging")
    assert (state["state"], state["code"]) == ("failed", 93)


def test_rank_that_is_killed_on_another_node_ends_all_nodes(cluster: Site) -> None:
    fault = "recovery.inject=[{at_step: 3, rank: 3}]"
    once = "recovery.max_restarts=0"
    run, job = submitted(cluster, "killed", "cluster.nodes=2", "train.steps=1000", fault, once)
    assert ended(cluster, job) == "FAILED", said(run)
    (failure,) = named(run, "rank_failed")
    assert (failure["rank"], failure["signal"]) == (3, "SIGKILL")
    assert failure["host"] != named(run, "attempt_started")[0]["host"]
    told = orchestra(cluster, "why", "killed").stdout
    assert f"rank 3 on {failure['host']} failed" in told


def test_warning_to_all_processes_stops_all_nodes_behind_one_step_with_a_checkpoint(cluster: Site) -> None:
    run, job = submitted(cluster, "warned", "cluster.nodes=2", "train.steps=100000", "cluster.requeue=never")
    wait_until(lambda: len(read_metrics(run)) > 2, "the run trains")
    cluster.run("scancel", "--signal=USR2", job)
    assert ended(cluster, job) == "FAILED", said(run)
    assert exit_code(cluster, job) == "75:0", said(run)
    stopped = {record["step"] for record in named(run, "failed") if "rank" in record}
    assert len(stopped) == 1
    state = state_of(cluster, "warned")
    assert (state["state"], state["checkpoint_step"]) == ("stopped", *stopped)


def test_edit_of_the_source_while_the_job_waits_changes_nothing(cluster: Site) -> None:
    tree = cluster.shared / "tree"
    for package in ("conf", "orchestra", "launchers", "checkpointing"):
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
    cluster.devcluster("exec", "controller", "--", "chown", "-R", cluster.user.pw_name, str(tree))
    changed = tree / "orchestra" / "train" / "__main__.py"
    changed.write_text(changed.read_text().replace("def main()", "UNCOMMITTED = True\n\n\ndef main()"))
    run, job = submitted(cluster, "frozen", "train.steps=2", "cluster.slurm_extra.begin=now+5", root=tree)
    assert cluster.job_state(job) == "PENDING"
    assert state_of(cluster, "frozen")["state"] == "queued"
    for file in tree.rglob("*.py"):
        file.write_text("raise SystemExit('edited after it was submitted')\n")
    assert ended(cluster, job) == "COMPLETED", said(run)
    assert "UNCOMMITTED" in (run.code / "orchestra" / "train" / "__main__.py").read_text()


def test_callers_own_allocation_does_not_reach_the_job(cluster: Site) -> None:
    outer = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "9", "SBATCH_PARTITION": "nowhere", "PMIX_RANK": "4"}
    run, job = submitted(cluster, "nested", "train.steps=1", 'cluster.setup=["env > inside"]', **outer)
    assert ended(cluster, job) == "COMPLETED", said(run)
    inside = (run.path / "inside").read_text()
    assert f"SLURM_JOB_ID={job}\n" in inside
    assert "PMIX_RANK" not in inside


def test_lost_answer_of_sbatch_submits_no_second_job(cluster: Site) -> None:
    wrappers = cluster.shared / "wrappers"
    wrappers.mkdir(exist_ok=True)
    sbatch = wrappers / "sbatch"
    lost = "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2"
    sbatch.write_text(f'#!/bin/sh\n{shutil.which("sbatch")} "$@" > /dev/null 2>&1\n{lost}\nexit 1\n')
    sbatch.chmod(sbatch.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    path = f"{wrappers}:{cluster.environment['PATH']}"
    run, job = submitted(cluster, "lost", "train.steps=1", "cluster.slurm_extra.hold=true", PATH=path)
    queue = cluster.run("squeue", "--noheader", "--format=%i %j").stdout.split("\n")
    assert [line for line in queue if line.endswith(" lost")] == [f"{job} lost"]
    assert json.loads(run.record.read_text())["jobs"][0]["id"] == job


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["cluster.partition=mian"], "no such partition; did you mean main?"),
        (["cluster.nodes=5"], "partition main has 4 nodes"),
        (["cluster.device=cuda", "cluster.gpus_per_node=5"], "have 4 GPUs each"),
        (["cluster.time_limit=1"], "leaves no time to train"),
        (["run.dir=/dev/shm/runs"], "lies in this machine's memory"),
        (["cluster.slurm_extra.reservation=nowhere"], "Slurm refuses the job"),
    ],
)
def test_wrong_wishes_end_with_2_before_anything_exists(
    cluster: Site, overrides: Sequence[str], words: str
) -> None:
    refused = orchestra(cluster, "submit", *TINY, "run.name=refused", *overrides, check=False)
    assert (refused.returncode, words in refused.stderr) == (2, True), refused.stderr
    assert not (cluster.shared / "runs" / "refused").exists()
    assert not cluster.run("squeue", "--noheader", "--name=refused").stdout


def test_dry_run_prints_the_script_that_would_be_submitted(cluster: Site) -> None:
    done = orchestra(cluster, "submit", *TINY, "run.name=dry", "cluster.nodes=3", "--dry-run")
    assert "#SBATCH --nodes=3\n" in done.stdout
    assert "expects it to start at" in done.stderr
    assert not (cluster.shared / "runs" / "dry").exists()


def test_silent_controller_ends_with_1_and_changes_no_state(cluster: Site) -> None:
    run, job = submitted(cluster, "waiting", "train.steps=1", "cluster.slurm_extra.hold=true")
    nowhere = cluster.shared / "nowhere.conf"
    text = cluster.layout.slurm_conf.read_text()
    line = next(line for line in text.splitlines() if line.startswith("SlurmctldHost="))
    nowhere.write_text(text.replace(line, "SlurmctldHost=localhost\nSlurmctldPort=1\nMessageTimeout=2"))
    told = orchestra(cluster, "status", "waiting", SLURM_CONF=str(nowhere))
    assert "note: squeue" in told.stderr
    assert "not started" in told.stdout
    refused = orchestra(cluster, "submit", *TINY, "run.name=b", check=False, SLURM_CONF=str(nowhere))
    assert (refused.returncode, "nothing was submitted" in refused.stderr) == (1, True), refused.stderr
    cluster.run("scancel", job)
    wait_until(lambda: cluster.job_state(job) == "CANCELLED", "the job is cancelled")
    assert state_of(cluster, "waiting")["state"] == "cancelled"
    assert not run.events.joinpath("attempt-000.node-000.jsonl").exists()
