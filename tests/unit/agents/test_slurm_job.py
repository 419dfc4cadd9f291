"""How a run goes on in another Slurm job, and how a start of one is ended; Slurm's commands are stand-ins."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fake_slurm import FakeSlurm

from conf.schema import Config
from launchers.launch_errors import LauncherError
from launchers.slurm import sbatch
from launchers.slurm.this_job import JobTask
from orchestra.agents import slurm_job
from orchestra.agents.slurm_job import SlurmJob
from orchestra.errors import LaunchError
from orchestra.recovery.excluded_hosts import ExcludeList, Listed
from orchestra.recovery.policy import Action, Decision
from orchestra.run.events import EventWriter, node_writer, read_events
from orchestra.run.files import Record
from orchestra.run.paths import RunDir
from orchestra.submit import resubmit

TASK = JobTask("12", 0, 0, 2, "node1", None, "alps")
SILENT = "Unable to contact slurm controller (connect failure)"
FAILED = "JobState=FAILED Reason=BadConstraints"

# $1 is the folder of what they say, and of what they were called with.
COMMANDS = {
    "sinfo": 'cat "{0}/nodes"',
    "squeue": 'cat "{0}/queue" && exit 0; echo "{1}" >&2; exit 1',
    "scancel": 'test -e "{0}/deaf" && rm "{0}/deaf" && echo "{1}" >&2 && exit 1; exit 0',
    "scontrol": 'case "$*" in *config*) cat "{0}/config"; exit 0;; esac\nfor job; do :; done\n'
    'test -e "{0}/silent" && rm "{0}/silent" && echo "{1}" >&2 && exit 1\n'
    'cat "{0}/job-$job" && exit 0; echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1',
    # With a list of nodes that it does not like the job is accepted and fails at once.
    "sbatch": 'state="JobState=PENDING Reason=None"; job=20\n'
    'case "$*" in *--exclude*) test -e "{0}/picky" && state="' + FAILED + '" && job=19;; esac\n'
    'test -e "{0}/hopeless" && state="' + FAILED + '"\n'
    'echo "JobId=$job $state Restarts=0" > "{0}/job-$job"; echo $job',
}


class Slurm(FakeSlurm):
    """A cluster of `nodes`, name by state, with one job that runs: 12."""

    def __init__(self, folder: Path, nodes: dict[str, str]) -> None:
        super().__init__(folder)
        for name, text in COMMANDS.items():
            self.put(name, text.format(folder, SILENT))
        self.tell("nodes", "".join(f"{name}|main*|{state}\n" for name, state in nodes.items()))
        self.tell("config", "ClusterName = alps\nSlurmdTimeout           = 300 sec\n")
        self.tell("queue", "")
        self.tell("job-12", "JobId=12 JobState=RUNNING Reason=None Restarts=0 Command=/job.sbatch\n")

    def tell(self, name: str, text: str = "") -> None:
        """Let the commands that read a file of this name read this text."""
        (self.folder / name).write_text(text)


@pytest.fixture
def slurm(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    for module in (sbatch, resubmit):
        monkeypatch.setattr(module, "_LOOK_AGAIN_S", (0.0, 0.0))
    monkeypatch.setattr(slurm_job, "_RELEASE_PAUSE_S", 0.0)
    return Slurm(fake_slurm.folder, {f"node{number}": "allocated" for number in (1, 2, 3, 4)})


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs" / "mine")
    run.control.mkdir(parents=True)
    run.record.write_text(json.dumps({"name": "mine", "jobs": [{"token": "orchestra:0", "id": "12"}]}))
    return run


def job_of(run: RunDir, nodes: int, spares: int = 0, **own: Any) -> SlurmJob:
    config = Config()
    cluster = replace(config.cluster, nodes=nodes, spare_nodes=spares, **own)
    return SlurmJob(run, replace(config, cluster=cluster), TASK)


def requeue(job: SlurmJob, run: RunDir, *lost: str) -> str:
    decision = Decision(Action.requeue, 1, "requeued without it", rule="node_is_gone", exclude=lost)
    return job.requeue(decision, 0, EventWriter(run, node_writer(0, 0), 0))


def jobs(run: RunDir) -> list[Record]:
    return list(json.loads(run.record.read_text())["jobs"])


def requeued(run: RunDir) -> list[Record]:
    return [event for event in read_events(run) if event["event"] == "requeued"]


def options(call: str, name: str) -> str | None:
    return next((it.partition("=")[2] for it in call.split() if it.startswith(f"--{name}=")), None)


def test_the_lost_node_is_left_out_where_enough_others_are_there(run: RunDir, slurm: Slurm) -> None:
    assert requeue(job_of(run, 2), run, "node2") == "job 20 goes on (requeued without it)"
    (call,) = slurm.calls("sbatch")
    assert (options(call, "exclude"), options(call, "begin")) == ("node2", None)
    assert "--dependency" not in call
    (event,) = requeued(run)
    assert (event["job"], event["after"], event["exclude"]) == ("20", "12", ["node2"])
    assert [(it["id"], it.get("after")) for it in jobs(run)] == [("12", None), ("20", "12")]


def test_lost_ones_come_before_listed_ones_and_spares_count_as_needed(run: RunDir, slurm: Slurm) -> None:
    now = time.time()
    listed = ExcludeList(run.path.parent, "alps")
    listed.add(Listed("node1", "failed twice", "runs/x", (1, 2), ("hang", "hang"), now - 60, now + 3600))
    requeue(job_of(run, 2, spares=1), run, "node2")
    requeue(job_of(run, 2), replace_record(run), "node2")
    excluded = [options(call, "exclude") for call in slurm.calls("sbatch")]
    assert excluded == ["node2", "node2,node1"]


def replace_record(run: RunDir) -> RunDir:
    """Forget the job that follows, as if nobody had submitted it."""
    run.record.write_text(json.dumps({"name": "mine", "jobs": [{"token": "orchestra:0", "id": "12"}]}))
    return run


def test_without_room_the_job_waits_until_slurm_has_noticed_the_dead_node(run: RunDir, slurm: Slurm) -> None:
    said = requeue(job_of(run, 3, spares=1), run, "node2")
    (call,) = slurm.calls("sbatch")
    assert (options(call, "exclude"), options(call, "begin")) == (None, "now+300")
    assert "it begins in 300 s" in said
    assert requeued(run)[0]["exclude"] == []


@pytest.mark.parametrize("text", ["ClusterName = alps\n", "SlurmdTimeout = 0 sec\n"])
def test_a_cluster_that_does_not_say_when_it_notices_is_given_a_minute(
    run: RunDir, slurm: Slurm, text: str
) -> None:
    slurm.tell("config", text)
    requeue(job_of(run, 4), run, "node2")
    assert options(slurm.calls("sbatch")[0], "begin") == "now+60"


def test_nodes_that_are_down_or_never_given_to_this_run_are_no_room(run: RunDir, slurm: Slurm) -> None:
    slurm.tell("nodes", "node1|main*|idle\nnode2|main*|allocated\nnode3|main*|mixed\nnode4|main*|drained\n")
    requeue(job_of(run, 3), run, "node2")
    requeue(job_of(replace_record(run), 2, exclude=["node3"]), run, "node2")
    assert [options(call, "exclude") for call in slurm.calls("sbatch")] == [None, None]
    assert [options(call, "begin") for call in slurm.calls("sbatch")] == ["now+300", "now+300"]


def test_a_node_that_slurm_has_missed_already_is_not_waited_for(run: RunDir, slurm: Slurm) -> None:
    slurm.tell("nodes", "node1|main*|idle\nnode2|main*|allocated*\nnode3|main*|down\n")
    requeue(job_of(run, 2), run, "node2")
    assert [options(slurm.calls("sbatch")[0], name) for name in ("exclude", "begin")] == [None, None]
    slurm.tell("nodes", "node1|main*|idle\nnode2|main*|down*\nnode3|main*|idle\n")
    requeue(job_of(replace_record(run), 2), run, "node2")
    assert options(slurm.calls("sbatch")[1], "exclude") == "node2"


def test_a_job_that_slurm_lets_fail_for_its_missing_nodes_is_submitted_with_them(
    run: RunDir, slurm: Slurm
) -> None:
    slurm.tell("picky")
    assert "job 20 goes on" in requeue(job_of(run, 2), run, "node2")
    first, second = slurm.calls("sbatch")
    assert (options(first, "exclude"), options(second, "exclude")) == ("node2", None)
    assert options(second, "begin") == "now+300"
    assert [it["id"] for it in jobs(run)] == ["12", "20"]


def test_a_run_whose_next_job_fails_at_once_does_not_look_queued(run: RunDir, slurm: Slurm) -> None:
    slurm.tell("hopeless")
    with pytest.raises(LaunchError, match=r"let job 20 fail at once \(BadConstraints\)"):
        requeue(job_of(run, 2), run, "node2")
    assert [it["id"] for it in jobs(run)] == ["12"]
    assert requeued(run) == []


def submitted_already(run: RunDir, job: str | None) -> None:
    entry = {"token": "orchestra:1", "id": job, "after": "12", "attempt": 1, "cluster": "alps"}
    run.record.write_text(json.dumps({"jobs": [{"token": "orchestra:0", "id": "12"}, entry]}))


@pytest.mark.parametrize("known", ["20", None])
def test_a_job_that_a_dead_leader_submitted_is_taken_over(
    run: RunDir, slurm: Slurm, known: str | None
) -> None:
    submitted_already(run, known)
    slurm.tell("queue", "20|PENDING|me|None||N/A|mine|orchestra:1\n")
    slurm.tell("job-20", "JobId=20 JobState=PENDING Reason=Priority Restarts=0\n")
    for _ in range(2):
        assert "job 20 goes on" in requeue(job_of(run, 2), run, "node2")
    assert slurm.calls("sbatch") == []
    assert [it["id"] for it in jobs(run)] == ["12", "20"]
    assert len(requeued(run)) == 1


def test_a_dead_leaders_job_that_slurm_never_had_is_submitted(run: RunDir, slurm: Slurm) -> None:
    submitted_already(run, None)
    assert "job 20 goes on" in requeue(job_of(run, 2), run, "node2")
    assert len(slurm.calls("sbatch")) == 1
    assert jobs(run)[-1]["id"] == "20"
    assert jobs(run)[-1]["token"] != "orchestra:1"


def test_nothing_is_submitted_where_slurm_does_not_say_whether_it_has_the_job(
    run: RunDir, slurm: Slurm
) -> None:
    submitted_already(run, None)
    (slurm.folder / "queue").unlink()
    with pytest.raises(LaunchError, match="may have been submitted already"):
        requeue(job_of(run, 2), run, "node2")
    assert slurm.calls("sbatch") == []


@pytest.mark.parametrize("trouble", ["silent", "deaf"])
def test_ending_the_job_is_tried_again_where_slurm_does_not_answer(
    run: RunDir, slurm: Slurm, trouble: str
) -> None:
    slurm.tell(trouble)
    job_of(run, 2).release([1])
    assert slurm.calls("scancel")[-1] == "scancel 12"
    assert len(slurm.calls("scontrol")) == 2


def test_a_job_that_slurm_requeued_before_it_answered_is_not_cancelled(run: RunDir, slurm: Slurm) -> None:
    slurm.tell("silent")
    slurm.tell("job-12", "JobId=12 JobState=PENDING Reason=BeginTime Restarts=1\n")
    job_of(run, 2).release([1])
    assert slurm.calls("scancel") == []


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", None])
def test_a_job_that_is_being_ended_needs_no_end(run: RunDir, slurm: Slurm, state: str | None) -> None:
    if state is None:
        (slurm.folder / "job-12").unlink()
    else:
        slurm.tell("job-12", f"JobId=12 JobState={state} Reason=None Restarts=0\n")
    job_of(run, 2).release([1])
    assert slurm.calls("scancel") == []


def test_a_silent_slurm_is_given_up_in_the_end(
    run: RunDir, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_job, "_RELEASE_TIMEOUT_S", -1.0)
    slurm.tell("silent")
    with pytest.raises(LauncherError, match="Unable to contact"):
        job_of(run, 2).release([1])


def test_a_job_that_lost_no_node_ends_by_itself(run: RunDir, slurm: Slurm) -> None:
    job_of(run, 2).release([])
    assert not (slurm.folder / "calls").exists()
