"""`orchestra resume` of runs that were submitted: a new job for the same run, once, or the foreground."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sites import Site, wait_until
from test_requeue import ENDLESS, last_step, trains_behind
from test_submit import TINY, ended, named, orchestra, said, state_of, submitted

from orchestra.run.config_file import read_config
from orchestra.run.metrics_file import read_metrics
from orchestra.run.paths import RunDir

pytestmark = pytest.mark.slow


def test_a_cancelled_run_goes_on_as_a_new_job_on_another_number_of_nodes(cluster: Site) -> None:
    run, first = submitted(cluster, "again", *ENDLESS, "cluster.nodes=2", "checkpoint.every_steps=1000")
    refused = orchestra(cluster, "resume", "again", check=False)
    assert refused.returncode == 2, refused.stdout
    trains_behind(run, 0)
    orchestra(cluster, "cancel", "again")
    assert ended(cluster, first) == "FAILED", said(run)
    step = last_step(run)
    script = orchestra(cluster, "resume", "again", "cluster.nodes=1", "--dry-run").stdout
    assert "#SBATCH --nodes=1\n" in script
    assert read_config(run.config).cluster.nodes == 2

    goes_on = (
        "resume",
        "again",
        "cluster.nodes=1",
        f"train.steps={step + 5}",
        "cluster.slurm_extra.hold=true",
    )
    facts = json.loads(orchestra(cluster, *goes_on, "--json").stdout)
    assert (facts["attempt"], facts["checkpoint_step"]) == (1, step)
    assert state_of(cluster, "again")["state"] == "queued"
    refused = orchestra(cluster, "resume", "again", check=False)
    assert (refused.returncode, f"job {facts['job']} waits" in refused.stderr) == (2, True), refused.stderr
    assert read_config(run.config_of_attempt(0)).cluster.nodes == 2

    cluster.run("scontrol", "release", facts["job"])
    assert ended(cluster, facts["job"]) == "COMPLETED", said(run)
    assert [start["nodes"] for start in named(run, "attempt_started")] == [2, 1]
    assert named(run, "restored")[-1]["step"] == step
    assert [row["step"] for row in read_metrics(run)] == list(range(1, step + 6))
    assert "is finished" in orchestra(cluster, "resume", "again").stdout

    here = ("cluster=local", "cluster.gpus_per_node=1", "cluster.device=cpu", f"train.steps={step + 7}")
    orchestra(cluster, "resume", "again", *here)
    assert last_step(run) == step + 7
    jobs = json.loads(run.record.read_text())["jobs"]
    assert [job["id"] for job in jobs] == [first, facts["job"]]


def test_a_run_of_this_machine_goes_on_in_a_job_and_never_without_slurms_word(cluster: Site) -> None:
    orchestra(cluster, "run", *TINY, "run.name=local", "train.steps=2")
    run = RunDir(cluster.shared / "runs" / "local")
    cpu = ("cluster=slurm", "cluster.device=cpu", "cluster.gpus_per_node=2", "cluster.slurm_extra.hold=true")
    facts = json.loads(orchestra(cluster, "resume", "local", "train.steps=4", *cpu, "--json").stdout)
    before = run.record.read_text()
    refused = orchestra(cluster, "resume", "local", check=False, SLURM_CONF=str(nowhere(cluster)))
    assert (refused.returncode, "nothing was done" in refused.stderr) == (1, True), refused.stderr
    assert run.record.read_text() == before

    # Taken out of the queue before it began.
    cluster.run("scancel", facts["job"])
    wait_until(lambda: cluster.job_state(facts["job"]) == "CANCELLED", "the job is cancelled")
    again = orchestra(cluster, "resume", "local", "cluster.slurm_extra.hold=false", "--json").stdout
    assert ended(cluster, json.loads(again)["job"]) == "COMPLETED", said(run)
    assert last_step(run) == 4


def nowhere(cluster: Site) -> Path:
    """Return a slurm.conf whose controller does not answer."""
    text = cluster.layout.slurm_conf.read_text()
    line = next(line for line in text.splitlines() if line.startswith("SlurmctldHost="))
    place = cluster.shared / "silent.conf"
    place.write_text(text.replace(line, "SlurmctldHost=localhost\nSlurmctldPort=1\nMessageTimeout=2"))
    return place
