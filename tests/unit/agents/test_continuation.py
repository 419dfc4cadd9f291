"""Whether and how a run goes on by itself after it was stopped: a table, and what is done about it."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from conf.schema import Config, Requeue
from launchers.launch_errors import SlurmRefused
from launchers.slurm.this_job import JobTask, OwnJob, parsed
from orchestra.agents.slurm_job import GoOnBy, RunContinuation, StopFacts, continuation, is_stalled
from orchestra.errors import EXIT_DO_NOT_RESTART, EXIT_STOPPED
from orchestra.recovery.incidents import Verdict
from orchestra.run import stop_requests
from orchestra.run.events import EventWriter, node_writer, read_events
from orchestra.run.files import Record
from orchestra.run.paths import RunDir

RUNNING = OwnJob("RUNNING")
LIMIT, TERM = stop_requests.TIME_LIMIT, "signal SIGTERM"
TASK = JobTask("12", 0, 0, 2, "node1", None)
STOPPED = Verdict(EXIT_STOPPED, "StopRequested", "time_limit, asked for by me on node1", step=7)


@pytest.mark.parametrize(
    ("policy", "reasons", "job", "how", "reason"),
    [
        # Warned of the limit.
        ("requeue", {LIMIT}, RUNNING, GoOnBy.requeue, "time_limit"),
        ("chain", {LIMIT}, RUNNING, GoOnBy.chain, "time_limit"),
        ("never", {LIMIT}, RUNNING, GoOnBy.end, "cluster.requeue=never (time_limit)"),
        # Slurm does not answer: the warning says enough, SIGTERM does not.
        ("requeue", {LIMIT}, None, GoOnBy.requeue, "time_limit"),
        (
            "requeue",
            {TERM},
            None,
            GoOnBy.end,
            "signal SIGTERM, and Slurm could not be asked what that means",
        ),
        # The limit itself, without or after the warning.
        ("requeue", {TERM}, OwnJob("COMPLETING", "TimeLimit"), GoOnBy.requeue, "time_limit"),
        ("chain", {LIMIT}, OwnJob("COMPLETING", "TimeLimit"), GoOnBy.chain, "time_limit"),
        # A job of more weight takes the nodes; sites may have it send the warning signal.
        ("requeue", {TERM}, OwnJob("RUNNING", is_preempted=True), GoOnBy.requeue, "preempted"),
        ("chain", {LIMIT}, OwnJob("RUNNING", is_preempted=True), GoOnBy.chain, "preempted"),
        (
            "never",
            {TERM},
            OwnJob("RUNNING", is_preempted=True),
            GoOnBy.end,
            "cluster.requeue=never (preempted)",
        ),
        # scancel, even after the warning.
        ("requeue", {TERM}, OwnJob("COMPLETING"), GoOnBy.end, "Slurm ends the job (COMPLETING)"),
        ("requeue", {LIMIT}, OwnJob("CANCELLED"), GoOnBy.end, "Slurm ends the job (CANCELLED)"),
        # orchestra cancel is stronger than all else.
        ("requeue", {LIMIT, stop_requests.CANCEL}, RUNNING, GoOnBy.end, "it was cancelled"),
        # A signal to one process of the job.
        ("requeue", {TERM}, RUNNING, GoOnBy.end, "signal SIGTERM"),
        ("requeue", set(), RUNNING, GoOnBy.end, "it was asked to stop"),
        # Slurm requeues it already: scontrol requeue by hand, preemption without a grace time.
        ("never", {TERM}, OwnJob("COMPLETING", restarts=1), GoOnBy.leave, "requeued in Slurm"),
        ("chain", {LIMIT}, OwnJob("COMPLETING", restarts=1), GoOnBy.leave, "time_limit"),
    ],
)
def test_what_follows_a_stop(
    policy: str, reasons: set[str], job: OwnJob | None, how: GoOnBy, reason: str
) -> None:
    found = continuation(StopFacts(Requeue(policy), frozenset(reasons), job, restart=0))
    assert (found.how, found.reason) == (how, reason)


def test_two_attempts_that_the_limit_ends_at_one_checkpoint_are_enough() -> None:
    stop = StopFacts(Requeue.requeue, frozenset({LIMIT}), RUNNING, restart=1, is_stalled=True)
    assert continuation(stop).how is GoOnBy.give_up
    assert continuation(replace(stop, policy=Requeue.chain)).how is GoOnBy.give_up
    # Who is preempted again and again has only bad luck.
    assert continuation(replace(stop, job=OwnJob("RUNNING", is_preempted=True))).how is GoOnBy.requeue


def test_progress_is_a_newer_checkpoint() -> None:
    def event(attempt: int, name: str, **facts: object) -> Record:
        return {"attempt": attempt, "event": name, "time": 0.0, **facts}

    first = [event(0, "attempt_started"), event(0, "checkpoint_committed", step=5)]
    went_on = [*first, event(0, "requeued", reason=LIMIT), event(1, "attempt_started")]
    assert is_stalled(went_on, 1)
    assert not is_stalled([*went_on, event(1, "checkpoint_committed", step=6)], 1)
    assert not is_stalled([*first, event(0, "requeued", reason="preempted"), event(1, "attempt_started")], 1)
    assert not is_stalled([*first, event(1, "attempt_started")], 1)
    called_off = event(0, "requeued", reason=LIMIT, before_start=True)
    assert not is_stalled([*first, called_off, event(1, "attempt_started")], 1), "a later start's limit"
    assert not is_stalled(first, 0)
    # Nothing was ever saved.
    never = [event(0, "attempt_started"), event(0, "requeued", reason=LIMIT), event(1, "attempt_started")]
    assert is_stalled(never, 1)


def test_a_job_is_read_as_scontrol_shows_it() -> None:
    text = (
        "JobId=11 ArrayJobId=11 ArrayTaskId=5 JobName=a b JobState=RUNNING Reason=None Requeue=1 Restarts=2 "
        "PreemptEligibleTime=2026-11-21T15:29:04 PreemptTime=2026-11-21T15:29:08 CPUs/Task=1 "
        "Command=/shared/my runs/job.sbatch WorkDir=/shared Comment=orchestra:1a Power= \n"
    )
    word = OwnJob("RUNNING", "", 2, True, "orchestra:1a", "/shared/my runs/job.sbatch")
    assert parsed(text) == word
    assert parsed(text.replace("PreemptTime=2026-11-21T15:29:08", "PreemptTime=None")) == replace(
        word, is_preempted=False
    )
    assert parsed("slurm_load_jobs error: Invalid job id specified\n") is None


class Slurm:
    """Commands that stand in for Slurm's: they write down how they were called and say what is set."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.says("scontrol show", "JobId=12 JobState=RUNNING Restarts=0 Command=/job.sbatch WorkDir=/")
        self.says("scontrol requeue", "")
        self.says("sbatch --parsable", "13")
        for name in ("scontrol", "sbatch"):
            file = folder / name
            flag = "requeue" if name == "scontrol" else "parsable"
            file.write_text(
                f'#!/bin/sh\necho "{name} $*" >> {folder}/calls\n'
                f'case "$*" in *{flag}*) a="{name}-{flag}";; *) a="{name}-show";; esac\n'
                f'code="$(cat "{folder}/$a.code")"; [ "$code" = 0 ] || exec >&2\n'
                f'[ "$code" = killed ] && kill -KILL $$; cat "{folder}/$a"; exit "$code"\n'
            )
            file.chmod(file.stat().st_mode | stat.S_IXUSR)
        queue = folder / "squeue"
        queue.write_text("#!/bin/sh\n")
        queue.chmod(queue.stat().st_mode | stat.S_IXUSR)

    def says(self, command: str, text: str, code: int | str = 0) -> None:
        name = command.replace(" --", "-").replace(" ", "-")
        place = self._folder / name
        place.write_text(text + "\n")
        place.with_name(f"{name}.code").write_text(str(code))

    def calls(self) -> list[str]:
        try:
            lines = (self._folder / "calls").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [line for line in lines if "show job" not in line]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return Slurm(folder)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "mine")
    run.control.mkdir(parents=True)
    run.record.write_text(json.dumps({"name": "mine", "jobs": [{"token": "orchestra:0", "id": "12"}]}))
    return run


def going_on(run: RunDir, attempt: int = 0, task: JobTask = TASK, policy: str = "requeue") -> RunContinuation:
    config = Config()
    config = replace(config, cluster=replace(config.cluster, requeue=Requeue(policy)))
    events = EventWriter(run, node_writer(attempt, 0), attempt)
    events.write("attempt_started", node=0, job=task.job)
    stop_requests.write_request(run, attempt, LIMIT)
    return RunContinuation(run, config, task, attempt, events)


def requeued(run: RunDir) -> list[Record]:
    return [event for event in read_events(run) if event["event"] == "requeued"]


def jobs(run: RunDir) -> list[Record]:
    return list(json.loads(run.record.read_text())["jobs"])


def test_a_job_is_requeued_by_its_own_name_and_the_event_stands_first(run: RunDir, slurm: Slurm) -> None:
    task = replace(TASK, job="11_5")
    assert going_on(run, task=task).go_on(STOPPED) == "requeued (time_limit)"
    assert slurm.calls() == ["scontrol requeue 11_5"]
    (event,) = requeued(run)
    assert (event["how"], event["reason"], event["job"]) == ("requeue", "time_limit", "11_5")
    assert len(jobs(run)) == 1


def test_what_may_not_be_requeued_is_chained(run: RunDir, slurm: Slurm) -> None:
    slurm.says("scontrol requeue", "Requested operation not supported", 1)
    assert "job 13 goes on (time_limit)" in going_on(run).go_on(STOPPED)
    assert [event["how"] for event in requeued(run)] == ["requeue", "chain"]
    first, second = jobs(run)
    assert (first["id"], second["id"], second["after"], second["attempt"]) == ("12", "13", "12", 1)
    (call,) = (call for call in slurm.calls() if call.startswith("sbatch"))
    options = f"--comment={second['token']} --dependency=afterany:12 /job.sbatch"
    assert call == f"sbatch --parsable {options}"


def test_a_task_of_an_array_is_chained_alone(run: RunDir, slurm: Slurm) -> None:
    going_on(run, task=replace(TASK, job="11_5"), policy="chain").go_on(STOPPED)
    assert "--dependency=afterany:11_5 --array=5 /job.sbatch" in slurm.calls()[-1]
    assert [(job["id"], job.get("task")) for job in jobs(run)][-1] == ("13", 5)


def test_a_chain_that_slurm_lets_fail_at_once_is_refused(run: RunDir, slurm: Slurm) -> None:
    slurm.says("scontrol show", "JobId=13 JobState=FAILED Reason=BadConstraints Restarts=0")
    with pytest.raises(SlurmRefused, match="let job 13 fail at once"):
        going_on(run, policy="chain")._chained("time_limit")
    assert [job["id"] for job in jobs(run)] == ["12"]


def test_a_refused_chain_leaves_a_stopped_run_without_a_job_that_is_none(run: RunDir, slurm: Slurm) -> None:
    slurm.says("sbatch --parsable", "Batch job submission failed: Invalid account", 1)
    assert "does not go on by itself" in going_on(run, policy="chain").go_on(STOPPED)
    assert len(jobs(run)) == 1
    assert read_events(run)[-1]["event"] == "failed"
    assert read_events(run)[-1]["code"] == EXIT_STOPPED


def test_a_requeue_that_ends_who_asked_for_it_is_no_refusal(run: RunDir, slurm: Slurm) -> None:
    slurm.says("scontrol requeue", "", "killed")
    slurm.says("scontrol show", "JobId=12 JobState=COMPLETING Restarts=1 Command=/job.sbatch WorkDir=/")
    going = going_on(run)
    plan = StopFacts(Requeue.requeue, frozenset({stop_requests.TIME_LIMIT}), OwnJob("RUNNING"), 0)
    assert continuation(plan).how is GoOnBy.requeue
    assert going._requeued("time_limit") == "requeued (time_limit)"
    assert not [call for call in slurm.calls() if call.startswith("sbatch")]


def test_a_requeue_by_hand_that_ended_the_ranks_at_once_is_recorded(run: RunDir, slurm: Slurm) -> None:
    slurm.says("scontrol show", "JobId=12 JobState=COMPLETING Restarts=1 Command=/job.sbatch WorkDir=/")
    assert "starts the job again" in going_on(run).go_on(replace(STOPPED, code=130))
    (event,) = requeued(run)
    assert (event["how"], event["job"]) == ("requeue", "12")


def test_no_progress_becomes_the_verdict(run: RunDir, slurm: Slurm) -> None:
    assert going_on(run, 0).final_verdict(STOPPED) is STOPPED
    going_on(run, 0).go_on(STOPPED)
    verdict = going_on(run, 1).final_verdict(STOPPED)
    assert (verdict.code, verdict.cause) == (EXIT_DO_NOT_RESTART, "no progress")
    assert "cluster.time_limit" in verdict.message


def test_failures_and_cancelled_runs_ask_nothing_of_slurm(run: RunDir, slurm: Slurm) -> None:
    going = going_on(run)
    for code in (0, 1, 93, 130):
        assert going.go_on(replace(STOPPED, code=code)) == ""
    stop_requests.write_request(run, 0, stop_requests.CANCEL)
    assert "it was cancelled" in going.go_on(STOPPED)
    assert (slurm.calls(), requeued(run)) == ([], [])
