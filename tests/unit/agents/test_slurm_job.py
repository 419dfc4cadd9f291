"""Whether and how a run goes on in Slurm after a stop or a lost node; Slurm's commands are stand-ins."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from job_in_slurm import NODES, SILENT, TASK, Slurm, job_of, jobs, options, record, requeued
from support.signal_handlers import as_from_a_terminal, send_here

from conf.schema import ClusterConfig, Config, Requeue
from launchers import LauncherError
from launchers.node_group import NodeGroup
from launchers.slurm import this_job
from launchers.slurm.this_job import JobSignals, JobTask, OwnJob, parsed
from orchestra.agents import slurm_job
from orchestra.agents.context import END, AgentContext
from orchestra.agents.leader import Leader, as_stopped
from orchestra.agents.slurm_job import GoOnBy, RunContinuation, SlurmJob, StopFacts, continuation, is_stalled
from orchestra.agents.wait_for_nodes import called_off
from orchestra.errors import EXIT_DO_NOT_RESTART, EXIT_FAILED, EXIT_STOPPED, LaunchError
from orchestra.recovery.excluded_hosts import ExcludeList, Listed
from orchestra.recovery.incidents import Verdict
from orchestra.recovery.policy import Action, Decision
from orchestra.run.control import stop_requests
from orchestra.run.events import EventWriter, node_writer, read_events
from orchestra.run.files import Record
from orchestra.run.paths import RunDir
from orchestra.submit.claims import upcoming_attempt

RUNNING, PREEMPTED = OwnJob("RUNNING"), OwnJob("RUNNING", is_preempted=True)
LIMIT, TERM = stop_requests.TIME_LIMIT, "signal SIGTERM"
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
        ("requeue", {TERM}, None, GoOnBy.end, f"{TERM}, and Slurm could not be asked what that means"),
        # The limit itself, without or after the warning.
        ("requeue", {TERM}, OwnJob("COMPLETING", "TimeLimit"), GoOnBy.requeue, "time_limit"),
        ("chain", {LIMIT}, OwnJob("COMPLETING", "TimeLimit"), GoOnBy.chain, "time_limit"),
        # A job of more weight takes the nodes; sites may have it send the warning signal.
        ("requeue", {TERM}, PREEMPTED, GoOnBy.requeue, "preempted"),
        ("chain", {LIMIT}, PREEMPTED, GoOnBy.chain, "preempted"),
        ("never", {TERM}, PREEMPTED, GoOnBy.end, "cluster.requeue=never (preempted)"),
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


def test_two_attempts_that_the_limit_ends_without_a_save_are_enough() -> None:
    stop = StopFacts(Requeue.requeue, frozenset({LIMIT}), RUNNING, restart=1, is_stalled=True)
    assert continuation(stop).how is GoOnBy.give_up
    assert continuation(replace(stop, policy=Requeue.chain)).how is GoOnBy.give_up
    # Who is preempted again and again has only bad luck.
    assert continuation(replace(stop, job=PREEMPTED)).how is GoOnBy.requeue


def test_progress_is_a_newer_checkpoint_and_one_attempt_without_it_is_tried_again() -> None:
    def event(attempt: int, name: str, **facts: object) -> Record:
        return {"attempt": attempt, "event": name, "time": 0.0, **facts}

    good = [event(0, "attempt_started"), event(0, "checkpoint_committed", step=5)]
    one_idle = [*good, event(0, "requeued", reason=LIMIT), event(1, "attempt_started")]
    assert not is_stalled(one_idle, 1)
    assert is_stalled([*one_idle, event(1, "requeued", reason=LIMIT), event(2, "attempt_started")], 2)
    idle = [*good, event(1, "attempt_started")]
    went_on = [*idle, event(1, "requeued", reason=LIMIT), event(2, "attempt_started")]
    assert is_stalled(went_on, 2)
    assert not is_stalled([*went_on, event(2, "checkpoint_committed", step=6)], 2)
    assert not is_stalled([*idle, event(1, "requeued", reason="preempted"), event(2, "attempt_started")], 2)
    assert not is_stalled([*idle, event(2, "attempt_started")], 2)
    called_off = event(1, "requeued", reason=LIMIT, before_start=True)
    assert not is_stalled([*idle, called_off, event(2, "attempt_started")], 2), "a later start's limit"
    assert not is_stalled(good, 0)
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
    odd = text.replace("/shared/my runs/", "/shared/my runs/lr=3 b=1/")
    assert parsed(odd) == replace(word, script="/shared/my runs/lr=3 b=1/job.sbatch")
    assert parsed(text.replace("PreemptTime=2026-11-21T15:29:08", "PreemptTime=None")) == replace(
        word, is_preempted=False
    )
    assert parsed("slurm_load_jobs error: Invalid job id specified\n") is None


def going_on(run: RunDir, attempt: int = 0, task: JobTask = TASK, policy: str = "requeue") -> RunContinuation:
    config = Config(cluster=ClusterConfig(requeue=Requeue(policy)))
    events = EventWriter(run, node_writer(attempt, 0), attempt)
    events.write("attempt_started", node=0, job=task.job)
    stop_requests.write_request(run, attempt, LIMIT)
    return RunContinuation(run, config, task, attempt, events)


def test_a_job_is_requeued_by_its_own_name_and_the_event_stands_first(run: RunDir, slurm: Slurm) -> None:
    slurm.has_job("11_5")
    task = replace(TASK, job="11_5")
    assert going_on(run, task=task).go_on(STOPPED) == "requeued (time_limit)"
    assert [call for call in slurm.calls() if "show job" not in call] == ["scontrol requeue 11_5"]
    (event,) = requeued(run)
    assert (event["how"], event["reason"], event["job"]) == ("requeue", "time_limit", "11_5")
    assert len(jobs(run)) == 1


def test_what_may_not_be_requeued_is_chained(run: RunDir, slurm: Slurm) -> None:
    slurm.tell("requeue", "echo Requested operation not supported >&2; exit 1")
    assert "job 20 goes on (time_limit)" in going_on(run).go_on(STOPPED)
    assert [event["how"] for event in requeued(run)] == ["requeue", "chain"]
    first, second = jobs(run)
    assert (first["id"], second["id"], second["after"], second["attempt"]) == ("12", "20", "12", 1)
    (call,) = slurm.calls("sbatch")
    options = f"--comment={second['token']} --dependency=afterany:12 /job.sbatch"
    assert call == f"sbatch --parsable {options}"


def test_a_controller_that_is_away_is_asked_again_to_queue_the_job(run: RunDir, slurm: Slurm) -> None:
    back = slurm.folder / "back"
    slurm.tell("requeue", f'test -e "{back}" && exit 0; touch "{back}"; echo "{SILENT}" >&2; exit 1')
    assert going_on(run).go_on(STOPPED) == "requeued (time_limit)"
    assert slurm.calls("scontrol requeue") == ["scontrol requeue 12"] * 2


def test_what_a_signal_means_is_asked_until_slurm_answers(
    run: RunDir, slurm: Slurm, signals: JobSignals
) -> None:
    slurm.has_job("12", PreemptTime="2026-01-01T00:00:00")
    slurm.tell("silent")
    code, said = called_off(warned(run, signals, signal.SIGTERM))
    assert (code, [event["reason"] for event in requeued(run)]) == (EXIT_STOPPED, ["preempted"]), said


def test_a_run_whose_controller_stays_away_is_not_said_to_be_requeued(
    run: RunDir, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_job, "_REQUEUE_PATIENCE_S", -1.0)
    slurm.tell("requeue", f'touch "{slurm.folder}/silent"; echo "{SILENT}" >&2; exit 1')
    said = going_on(run).go_on(STOPPED)
    assert "requeued (" not in said
    assert "Unable to contact" in said


def test_what_delayed_or_held_the_first_job_does_not_hold_back_the_next(
    run: RunDir, slurm: Slurm, tmp_path: Path
) -> None:
    script = tmp_path / "own.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH --begin=22:00\n#SBATCH --hold\n")
    slurm.has_job("12", Command=str(script))
    going_on(run, policy="chain").go_on(STOPPED)
    (call,) = slurm.calls("sbatch")
    assert options(call, "begin") == "now"
    assert slurm.calls("scontrol release") == ["scontrol release 20"]


def test_a_job_whose_first_node_came_back_is_followed_by_one_that_is_not_held(
    run: RunDir, slurm: Slurm
) -> None:
    slurm.has_job("12", "COMPLETING", restarts=1)
    said = going_on(run).go_on(STOPPED, is_first_lost=True)
    assert said == "job 20 goes on (its first node was lost and came back)"
    (call,) = slurm.calls("sbatch")
    assert "--dependency" not in call
    assert slurm.calls("scancel") == ["scancel 12"]
    assert [event["how"] for event in requeued(run)] == ["chain"]


def test_without_such_a_job_slurm_starts_this_one_again(run: RunDir, slurm: Slurm) -> None:
    slurm.has_job("12", "COMPLETING", restarts=1)
    slurm.says("sbatch", complains="Batch job submission failed: Invalid account", code=1)
    said = going_on(run).go_on(STOPPED, is_first_lost=True)
    assert said == "Slurm starts the job again (its first node was lost and came back)"
    assert slurm.calls("scancel") == []
    assert [event["how"] for event in requeued(run)] == ["requeue"]


def let_go(job: SlurmJob, *hosts: str) -> None:
    job.let_go(hosts)
    for thread in threading.enumerate():
        if thread.name == "lets-go":
            thread.join(30)


def updates(slurm: Slurm) -> list[str]:
    return [call for call in slurm.calls("scontrol") if " update " in call]


def test_lost_hosts_are_given_back_once_and_never_that_of_the_batch_script(
    run: RunDir, slurm: Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.has_job("12", NodeList=NODES, BatchHost="node1")
    slurm.tell("job-NodeList=node1")
    job = job_of(run, 2)
    let_go(job, "node1")
    assert updates(slurm) == []
    slurm.tell("silent")
    let_go(job, "node1", "node2")
    slurm.has_job("12", NodeList="node1", BatchHost="node1")
    slurm.tell("job-node1", "node1\n")
    let_go(job, "node2")
    assert updates(slurm) == ["scontrol update JobId=12 NodeList=node1"]
    assert capsys.readouterr().out == "given back to Slurm: node2\n"


def test_a_cluster_that_does_not_let_jobs_shrink_keeps_the_host(
    run: RunDir, slurm: Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.has_job("12", NodeList=NODES, BatchHost="node1")
    slurm.tell("otherwise", "Requested operation is presently disabled")
    let_go(job_of(run, 2), "node2")
    assert capsys.readouterr().out.startswith("node2 not given back to Slurm: ")


def test_a_task_of_an_array_is_chained_alone_whatever_the_cluster_is_called(
    run: RunDir, slurm: Slurm
) -> None:
    slurm.has_job("11_5")
    slurm.has_job("20_5", "PENDING")
    going_on(run, task=replace(TASK, job="11_5", cluster=None), policy="chain").go_on(STOPPED)
    assert "--dependency=afterany:11_5 --array=5 /job.sbatch" in slurm.calls("sbatch")[0]
    assert [(job["id"], job.get("task")) for job in jobs(run)][-1] == ("20", 5)


def test_a_chain_that_slurm_lets_fail_at_once_is_refused(run: RunDir, slurm: Slurm) -> None:
    slurm.tell("hopeless")
    assert "let job 20 fail at once" in going_on(run, policy="chain").go_on(STOPPED)
    assert [job["id"] for job in jobs(run)] == ["12"]


def test_a_refused_chain_leaves_a_stopped_run_without_a_job_that_is_none(run: RunDir, slurm: Slurm) -> None:
    slurm.says("sbatch", complains="Batch job submission failed: Invalid account", code=1)
    assert "does not go on by itself" in going_on(run, policy="chain").go_on(STOPPED)
    assert len(jobs(run)) == 1
    assert read_events(run)[-1]["event"] == "failed"
    assert read_events(run)[-1]["code"] == EXIT_STOPPED


def test_a_requeue_that_ends_who_asked_for_it_is_no_refusal(run: RunDir, slurm: Slurm) -> None:
    slurm.tell("requeue", "kill -KILL $$")
    slurm.has_job("12", "COMPLETING", restarts=1)
    assert going_on(run)._requeued("time_limit") == "requeued (time_limit)"
    assert slurm.calls("sbatch") == []


def test_a_requeue_by_hand_that_ended_the_ranks_at_once_is_recorded(run: RunDir, slurm: Slurm) -> None:
    slurm.has_job("12", "COMPLETING", restarts=1)
    assert "starts the job again" in going_on(run).go_on(replace(STOPPED, code=130))
    (event,) = requeued(run)
    assert (event["how"], event["job"]) == ("requeue", "12")


def test_no_progress_becomes_the_verdict(run: RunDir, slurm: Slurm) -> None:
    assert going_on(run, 0).final_verdict(STOPPED) is STOPPED
    going_on(run, 0).go_on(STOPPED)
    verdict = going_on(run, 1).final_verdict(STOPPED)
    assert (verdict.code, verdict.cause) == (EXIT_DO_NOT_RESTART, "no progress")
    assert "cluster.time_limit" in verdict.message


def test_a_warning_before_the_limit_takes_no_progress_not_back(run: RunDir, slurm: Slurm) -> None:
    request = stop_requests.new_request(1, stop_requests.TIME_LIMIT)
    stalled = replace(STOPPED, code=EXIT_DO_NOT_RESTART, cause="no progress")
    assert as_stopped(stalled, [request]) == stalled
    assert as_stopped(replace(STOPPED, code=EXIT_FAILED), [request]).code == EXIT_STOPPED


def test_failures_and_cancelled_runs_ask_nothing_of_slurm(run: RunDir, slurm: Slurm) -> None:
    going = going_on(run)
    for code in (0, 1, 93, 130):
        assert going.go_on(replace(STOPPED, code=code)) == ""
    stop_requests.write_request(run, 0, stop_requests.CANCEL)
    assert "it was cancelled" in going.go_on(STOPPED)
    assert [call for call in slurm.calls() if "show job" not in call] == []
    assert requeued(run) == []


# A warning that comes while a job's nodes are still gathering: the run goes on where one goes on that was
# warned while it trained. Real signals, real files.


@pytest.fixture
def signals() -> Iterator[JobSignals]:
    # They are left ignored after a task's end, which is not this process's.
    with as_from_a_terminal(), JobSignals() as signals:
        yield signals


def warned(
    run: RunDir, signals: JobSignals, number: int = signal.SIGUSR2, policy: Requeue = Requeue.requeue
) -> AgentContext:
    """Return the context of a job's first node, whose agent has heard a signal."""
    send_here(number)
    job = job_of(run, 2, requeue=policy)
    group = NodeGroup(run.control / "job-12.start-0", 0, 2, 5.0)
    return AgentContext(run, job._config, group, signals, job, lambda _: None)


def test_by_chain_another_job_is_submitted_for_it(run: RunDir, slurm: Slurm, signals: JobSignals) -> None:
    code, said = called_off(warned(run, signals, policy=Requeue.chain))
    assert (code, "job 20 goes on (time_limit)" in said) == (EXIT_STOPPED, True)
    assert [(job["id"], job["attempt"]) for job in jobs(run)] == [("12", 0), ("20", 0)]


def test_sigterm_ends_it_unless_it_means_a_preemption(run: RunDir, slurm: Slurm, signals: JobSignals) -> None:
    code, said = called_off(warned(run, signals, signal.SIGTERM))
    assert (code, requeued(run)) == (EXIT_STOPPED, [])
    assert "signal SIGTERM" in said
    (told,) = [event for event in read_events(run) if event["event"] == "start_failed"]
    assert (told["job"], told["code"], told["cause"]) == (TASK.job, EXIT_STOPPED, said)
    slurm.has_job("12", PreemptTime="2026-01-01T00:00:00")
    called_off(warned(run, signals, signal.SIGTERM))
    assert [event["reason"] for event in requeued(run)] == ["preempted"]


def test_a_cancelled_run_does_not_go_on_until_somebody_resumes_it(
    run: RunDir, slurm: Slurm, signals: JobSignals
) -> None:
    stop_requests.write_request(run, upcoming_attempt(run), stop_requests.CANCEL)
    _, said = called_off(warned(run, signals))
    assert "it was cancelled" in said
    assert requeued(run) == []
    # The newest job was submitted for attempt 1, after attempt 0 had been cancelled.
    EventWriter(run, node_writer(0, 0), 0).write("attempt_started", node=0)
    record(run, {"token": "orchestra:0", "id": "12", "attempt": 1})
    called_off(warned(run, signals))
    assert [(event["attempt"], event["reason"]) for event in requeued(run)] == [(0, "time_limit")]


def test_jobs_that_are_over_before_anything_begins_are_not_started_for_ever(
    run: RunDir, slurm: Slurm, signals: JobSignals
) -> None:
    codes = [called_off(warned(run, signals))[0] for _ in range(4)]
    (told,) = [event for event in read_events(run) if event["event"] == "start_failed"]
    assert (told["job"], told["code"]) == (TASK.job, EXIT_DO_NOT_RESTART)
    assert codes == [EXIT_STOPPED] * 3 + [EXIT_DO_NOT_RESTART]
    assert len(slurm.calls("scontrol requeue")) == 3
    EventWriter(run, node_writer(0, 0), 0).write("attempt_started", node=0)
    assert called_off(warned(run, signals))[0] == EXIT_STOPPED, "an attempt that began is progress"


def test_the_leader_ends_the_job_with_that_word(run: RunDir, slurm: Slurm, signals: JobSignals) -> None:
    context = warned(run, signals)
    context.group.join("node1", "127.0.0.1", {"port": 1})
    Leader(context).look(None)
    order = context.group.newest_order()
    context.group.leave()
    assert order is not None
    assert (order.action, order.facts["code"]) == ("end", EXIT_STOPPED)
    assert "requeued (time_limit)" in str(order.facts["said"])


# After the loss of a node it goes on in another job, and this start of the job is ended.


def requeue(job: SlurmJob, run: RunDir, *lost: str) -> str:
    decision = Decision(Action.requeue, 1, "requeued without it", rule="node_is_gone", exclude=lost)
    return job.requeue(decision, 0, EventWriter(run, node_writer(0, 0), 0))


def forgotten(run: RunDir) -> RunDir:
    """Forget the job that follows, as if nobody had submitted it."""
    record(run)
    return run


def asked(slurm: Slurm) -> list[tuple[str | None, str | None]]:
    """Return the nodes that each next job was to leave out, and when it was to begin."""
    return [(options(call, "exclude"), options(call, "begin")) for call in slurm.calls("sbatch")]


def test_the_lost_node_is_left_out_where_enough_others_are_there(run: RunDir, slurm: Slurm) -> None:
    assert requeue(job_of(run, 2), run, "node2") == "job 20 goes on (requeued without it)"
    assert asked(slurm) == [("node2", None)]
    assert "--dependency" not in slurm.calls("sbatch")[0]
    (event,) = requeued(run)
    assert (event["job"], event["after"], event["exclude"]) == ("20", "12", ["node2"])
    assert [(entry["id"], entry.get("after")) for entry in jobs(run)] == [("12", None), ("20", "12")]


def test_without_room_the_job_waits_until_slurm_has_noticed_the_dead_node(run: RunDir, slurm: Slurm) -> None:
    assert "it begins in 300 s" in requeue(job_of(run, 3, spares=1), run, "node2")
    assert asked(slurm) == [(None, "now+300")]
    assert requeued(run)[0]["exclude"] == []


@pytest.mark.parametrize("own", [[], ["node4"]])
def test_hosts_that_were_listed_when_the_script_was_written_are_left_out_no_longer_than_the_list_says(
    run: RunDir, slurm: Slurm, own: list[str]
) -> None:
    script = ["node3", *own]
    slurm.has_job("12", ExcNodeList=",".join(script))
    slurm.tell(f"job-{','.join(script)}", "\n".join(script))
    requeue(job_of(run, 2, exclude=own), run)
    chained = RunContinuation(
        forgotten(run),
        job_of(run, 2, exclude=own, requeue=Requeue.chain)._config,
        TASK,
        0,
        EventWriter(run, node_writer(0, 0), 0),
        lambda: frozenset([LIMIT]),
    )
    chained.go_on(STOPPED)
    assert [exclude for exclude, _ in asked(slurm)] == [",".join(own)] * 2
    # A script that says no more than the configuration needs no other word.
    slurm.has_job("12", ExcNodeList=",".join(own))
    slurm.tell(f"job-{','.join(own)}", "\n".join(own))
    requeue(job_of(forgotten(run), 2, exclude=own), run)
    assert asked(slurm)[-1] == (None, None)


@pytest.mark.parametrize("is_range", [True, False])
def test_a_run_that_may_train_on_fewer_nodes_waits_for_no_dead_one(
    run: RunDir, slurm: Slurm, is_range: bool
) -> None:
    """It waited until Slurm had noticed, and of a job that asks for all its nodes until that one was back."""
    config = Config()
    own = replace(config.cluster, nodes=4, gpus_per_node=1, min_nodes=2 if is_range else None)
    recovery = replace(config.recovery, min_nodes=2)
    job = SlurmJob(run, replace(config, cluster=own, recovery=recovery), TASK)
    assert requeue(job, run, "node2") == "job 20 goes on (requeued without it)"
    assert asked(slurm) == [("node2", None)]
    # The script of a job that may begin with two says so.
    assert options(slurm.calls("sbatch")[0], "nodes") == (None if is_range else "2-4")
    (event,) = requeued(run)
    assert event["exclude"] == ["node2"]


def test_it_asks_for_all_its_nodes_where_the_cluster_has_them(run: RunDir, slurm: Slurm) -> None:
    config = Config()
    own = replace(config.cluster, nodes=3, gpus_per_node=1)
    recovery = replace(config.recovery, min_nodes=1)
    job = SlurmJob(run, replace(config, cluster=own, recovery=recovery), TASK)
    requeue(job, run, "node2")
    assert [options(call, "nodes") for call in slurm.calls("sbatch")] == [None]
    # One is down that the run did not lose.
    slurm.has_nodes(node1="idle", node2="idle", node3="down", node4="down")
    requeue(SlurmJob(forgotten(run), replace(config, cluster=own, recovery=recovery), TASK), run)
    assert options(slurm.calls("sbatch")[1], "nodes") == "1-3"


def test_lost_ones_come_before_listed_ones_and_spares_count_as_needed(run: RunDir, slurm: Slurm) -> None:
    now = time.time()
    listed = ExcludeList(run.path.parent, "alps")
    listed.add(Listed("node1", "failed twice", "runs/x", (1, 2), ("hang", "hang"), now - 60, now + 3600))
    requeue(job_of(run, 2, spares=1), run, "node2")
    requeue(job_of(forgotten(run), 2), run, "node2")
    assert asked(slurm) == [("node2", None), ("node2,node1", None)]


@pytest.mark.parametrize("text", ["ClusterName = alps\n", "SlurmdTimeout = 0 sec\n"])
def test_a_cluster_that_does_not_say_when_it_notices_is_given_a_minute(
    run: RunDir, slurm: Slurm, text: str
) -> None:
    slurm.tell("config", text)
    requeue(job_of(run, 4), run, "node2")
    assert asked(slurm) == [(None, "now+60")]


def test_nodes_that_are_down_or_never_given_to_this_run_are_no_room(run: RunDir, slurm: Slurm) -> None:
    slurm.has_nodes(node1="idle", node2="allocated", node3="mixed", node4="drained")
    requeue(job_of(run, 3), run, "node2")
    requeue(job_of(forgotten(run), 2, exclude=["node3"]), run, "node2")
    assert asked(slurm) == [(None, "now+300")] * 2


def test_a_node_that_slurm_has_missed_already_is_not_waited_for(run: RunDir, slurm: Slurm) -> None:
    slurm.has_nodes(node1="idle", node2="allocated*", node3="down")
    requeue(job_of(run, 2), run, "node2")
    slurm.has_nodes(node1="idle", node2="down*", node3="idle")
    requeue(job_of(forgotten(run), 2), run, "node2")
    assert asked(slurm) == [(None, None), ("node2", None)]


def test_a_job_that_slurm_lets_fail_for_its_missing_nodes_is_submitted_with_them(
    run: RunDir, slurm: Slurm
) -> None:
    slurm.tell("picky")
    assert "job 20 goes on" in requeue(job_of(run, 2), run, "node2")
    assert asked(slurm) == [("node2", None), (None, "now+300")]
    assert [entry["id"] for entry in jobs(run)] == ["12", "20"]


def test_a_run_whose_next_job_fails_at_once_does_not_look_queued(run: RunDir, slurm: Slurm) -> None:
    slurm.tell("hopeless")
    with pytest.raises(LaunchError, match=r"let job 20 fail at once \(BadConstraints\)"):
        requeue(job_of(run, 2), run, "node2")
    assert [entry["id"] for entry in jobs(run)] == ["12"]
    assert requeued(run) == []


def submitted_already(run: RunDir, job: str | None) -> None:
    entry = {"token": "orchestra:1", "id": job, "after": "12", "attempt": 1, "cluster": "alps"}
    record(run, *jobs(run), entry)


@pytest.mark.parametrize("known", ["20", None])
def test_a_job_that_a_dead_leader_submitted_is_taken_over(
    run: RunDir, slurm: Slurm, known: str | None
) -> None:
    submitted_already(run, known)
    slurm.tell("queue", "20|PENDING|me|None||N/A|mine|orchestra:1\n")
    slurm.has_job("20", "PENDING", Reason="Priority")
    for _ in range(2):
        assert "job 20 goes on" in requeue(job_of(run, 2), run, "node2")
    assert slurm.calls("sbatch") == []
    assert [entry["id"] for entry in jobs(run)] == ["12", "20"]
    assert len(requeued(run)) == 1


def test_a_dead_leaders_job_that_slurm_never_had_is_submitted(run: RunDir, slurm: Slurm) -> None:
    submitted_already(run, None)
    assert "job 20 goes on" in requeue(job_of(run, 2), run, "node2")
    assert len(slurm.calls("sbatch")) == 1
    assert jobs(run)[-1]["id"] == "20"
    assert jobs(run)[-1]["token"] != "orchestra:1"


class Killed(BaseException):
    """What ends a leader in the midst of what it does."""


class LastWord(EventWriter):
    """The events of a leader that dies before it can write one of them."""

    def write(self, event: str, **evidence: object) -> None:
        raise Killed(event, evidence)


def dead_leader(run: RunDir, *, is_before_start: bool = False) -> None:
    """Let a leader submit the next job, and die before it says so."""
    context = {"before_start": True} if is_before_start else {}
    decision = Decision(Action.requeue, 1, "requeued without it", rule="node_is_gone", exclude=("node2",))
    with pytest.raises(Killed):
        job_of(run, 2).requeue(decision, 0, LastWord(run, node_writer(0, 0), 0, **context))
    assert requeued(run) == []


@pytest.mark.parametrize("is_before_start", [False, True])
def test_the_job_that_a_dead_leader_submitted_says_itself_why_it_goes_on(
    run: RunDir, slurm: Slurm, is_before_start: bool
) -> None:
    """Nobody of the old job may have lived to say so."""
    dead_leader(run, is_before_start=is_before_start)
    next_job = SlurmJob(run, Config(), replace(TASK, job="20"))
    for _ in range(2):
        next_job.complete_history()
    (event,) = requeued(run)
    told = {key: event.get(key) for key in ("attempt", "job", "after", "how", "rule", "exclude", "reason")}
    assert told == {
        "attempt": 0,
        "job": "20",
        "after": "12",
        "how": "chain",
        "rule": "node_is_gone",
        "exclude": ["node2"],
        "reason": "requeued without it",
    }
    assert event.get("before_start", False) is is_before_start


def test_a_job_whose_submitter_never_had_an_answer_writes_down_which_one_it_is(
    run: RunDir, slurm: Slurm
) -> None:
    dead_leader(run)
    known = jobs(run)
    record(run, *known[:-1], {**known[-1], "id": None})
    slurm.has_job("20", Comment=str(known[-1]["token"]))
    # A job that was submitted by a person says nothing of a move.
    SlurmJob(run, Config(), replace(TASK, job="20")).complete_history()
    assert jobs(run)[-1]["id"] == "20"
    assert [event["job"] for event in requeued(run)] == ["20"]


def test_the_next_leader_of_the_same_start_begins_nothing_beside_that_job(run: RunDir, slurm: Slurm) -> None:
    own = job_of(run, 2)
    assert own.moved_to() is None
    dead_leader(run)
    words = "job 20 goes on, which an agent submitted that led before"
    assert [own.moved_to(), own.moved_to()] == [words, words]
    assert len(requeued(run)) == 1
    # Slurm may start this job again, and somebody else submit another one.
    assert SlurmJob(run, Config(), replace(TASK, restart=1)).moved_to() is None
    record(run, *jobs(run), {"token": "orchestra:2", "id": "30", "attempt": 1})
    assert own.moved_to() is None


def test_a_start_that_a_dead_leader_let_go_on_elsewhere_ends_as_told_and_is_no_rival(
    run: RunDir, slurm: Slurm
) -> None:
    dead_leader(run, is_before_start=True)
    slurm.has_job("20", "PENDING", Reason="Priority")
    group = NodeGroup(run.control / "job-12.start-0", 0, 1, 15.0)
    group.join("node1", "127.0.0.1", {"port": 1})
    said: list[str] = []
    context = AgentContext(run, Config(), group, JobSignals(), job_of(run, 2), said.append)
    Leader(context).look(None)
    order = group.newest_order()
    group.leave()
    assert order is not None
    assert (order.action, order.facts["code"]) == (END, 1)
    assert said == ["job 20 goes on, which an agent submitted that led before"]
    assert [event["job"] for event in requeued(run)] == ["20"]


def test_nothing_is_submitted_where_slurm_does_not_say_if_it_has_the_job(run: RunDir, slurm: Slurm) -> None:
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


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", "PENDING", None])
def test_a_job_that_is_ended_requeued_or_forgotten_needs_no_end(
    run: RunDir, slurm: Slurm, state: str | None
) -> None:
    if state is None:
        (slurm.folder / "job-12").unlink()
    else:
        slurm.has_job("12", state, restarts=int(state == "PENDING"))
    # Slurm answers the second time only.
    slurm.tell("silent")
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
